package org.djlmoe.autograd;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.nn.Block;
import ai.djl.nn.Parameter;
import ai.djl.nn.SequentialBlock;
import ai.djl.nn.core.Linear;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.junit.jupiter.api.Test;

class ParameterPathsTest {

    /** Calls its first child's parameters by other names. */
    private static final class Named extends SequentialBlock implements NamedParameters {

        private final String prefix;

        Named(String prefix) {
            this.prefix = prefix;
            add(linear());
        }

        @Override
        public Map<String, Parameter> namedParameters() {
            Map<String, Parameter> named = new LinkedHashMap<>();
            getChildren()
                    .get(0)
                    .getValue()
                    .getParameters()
                    .forEach(p -> named.put(prefix + "." + p.getKey(), p.getValue()));
            return named;
        }
    }

    private static Block linear() {
        return Linear.builder().setUnits(2).build();
    }

    @Test
    void of_plainBlock_areDjlsNames() {
        Block block = new SequentialBlock().add(linear()).add(linear());
        assertEquals(block.getParameters().keys(), List.copyOf(ParameterPaths.of(block).keySet()));
    }

    @Test
    void of_namedBlockWrapped_areItsOwnNamesAndDjlsForTheRest() {
        Block block = new SequentialBlock().add(new Checkpointed(new Named("model"))).add(linear());
        List<String> paths = List.copyOf(ParameterPaths.of(block).keySet());
        assertEquals(List.of("model.weight", "model.bias"), paths.subList(0, 2));
        assertEquals(block.getParameters().keys().subList(2, 4), paths.subList(2, 4));
    }

    @Test
    void of_wrappedBlocks_areNamedAsIfTheyWereNot() {
        Block inner = new SequentialBlock().add(linear()).add(linear());
        Block plain = new SequentialBlock().add(inner).add(linear());
        Block wrapped =
                new SequentialBlock()
                        .add(
                                new Checkpointed(
                                        new SequentialBlock()
                                                .add(new Checkpointed(new Checkpointed(linear())))
                                                .add(linear())))
                        .add(new Checkpointed(linear()));

        assertEquals(
                List.copyOf(ParameterPaths.of(plain).keySet()),
                List.copyOf(ParameterPaths.of(wrapped).keySet()));
        assertEquals(
                plain.getParameters().keys(), List.copyOf(ParameterPaths.of(wrapped).keySet()));
    }

    @Test
    void of_childNamedByItsUser_keepsTheName() {
        assertEquals(
                List.copyOf(ParameterPaths.of(new Child(linear())).keySet()),
                List.copyOf(ParameterPaths.of(new Child(new Checkpointed(linear()))).keySet()));
    }

    /** Gives its child a name that looks like a wrapper's. */
    private static final class Child extends SequentialBlock {
        Child(Block child) {
            addChildBlock("encoderCheckpointed", child);
        }
    }

    @Test
    void of_namedInNamed_outermostCounts() {
        Block inner = new Named("inner");
        class Outer extends SequentialBlock implements NamedParameters {
            @Override
            public Map<String, Parameter> namedParameters() {
                return Map.of("outer", inner.getParameters().get(0).getValue());
            }
        }
        Block block = new Outer().add(inner);
        List<String> paths = List.copyOf(ParameterPaths.of(block).keySet());
        assertEquals("outer", paths.get(0));
        assertEquals(block.getParameters().keys().get(1), paths.get(1));
    }

    @Test
    void of_sharedBlock_eachParameterOnce() {
        Block shared = linear();
        Block block = new SequentialBlock().add(shared).add(shared);
        assertEquals(4, block.getParameters().size());
        assertEquals(2, ParameterPaths.of(block).size());
    }

    @Test
    void of_twoParametersOfOneName_isRefused() {
        Block block = new SequentialBlock().add(new Named("model")).add(new Named("model"));
        IllegalArgumentException e =
                assertThrows(IllegalArgumentException.class, () -> ParameterPaths.of(block));
        assertTrue(e.getMessage().contains("model.weight"), e.getMessage());
    }
}
