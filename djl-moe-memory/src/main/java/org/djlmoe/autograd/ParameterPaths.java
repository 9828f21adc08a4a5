package org.djlmoe.autograd;

import ai.djl.nn.Block;
import ai.djl.nn.Parameter;
import ai.djl.util.Pair;
import java.util.IdentityHashMap;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.function.BiConsumer;

/**
 * The name of every parameter in a model, its <em>path</em>. Whatever is kept about a parameter
 * (optimizer state, decay groups, messages) is kept under it.
 *
 * <p>The path is the name that the outermost {@link NamedParameters} block around the parameter
 * gives it, and otherwise DJL's name from {@link Block#getParameters()}, as it would be without any
 * {@link Checkpointed}.
 */
public final class ParameterPaths {

    private ParameterPaths() {}

    /**
     * Returns the parameters of a block by path.
     *
     * @param block any block
     * @return the parameters, each once, in the block's order
     * @throws IllegalArgumentException if two parameters have the same path
     */
    public static Map<String, Parameter> of(Block block) {
        Map<Parameter, String> named = new IdentityHashMap<>();
        collectNamed(block, named);
        Map<String, Parameter> paths = new LinkedHashMap<>();
        Map<Parameter, String> seen = new IdentityHashMap<>();
        collect(
                block,
                "",
                (name, parameter) -> {
                    String path = named.getOrDefault(parameter, name);
                    if (seen.putIfAbsent(parameter, path) == null
                            && paths.putIfAbsent(path, parameter) != null) {
                        throw new IllegalArgumentException(
                                "Two parameters are named "
                                        + path
                                        + "; let the block around both implement NamedParameters"
                                        + " and tell them apart");
                    }
                });
        return paths;
    }

    private static void collectNamed(Block block, Map<Parameter, String> named) {
        Block actual = Checkpointed.unwrap(block);
        if (actual instanceof NamedParameters) {
            ((NamedParameters) actual)
                    .namedParameters()
                    .forEach((path, parameter) -> named.putIfAbsent(parameter, path));
        } else {
            actual.getChildren().values().forEach(child -> collectNamed(child, named));
        }
    }

    /** As {@link Block#getParameters()} does, but for the names that DJL makes of a wrapper's. */
    private static void collect(Block block, String prefix, BiConsumer<String, Parameter> to) {
        Block actual = Checkpointed.unwrap(block);
        actual.getDirectParameters().forEach(p -> to.accept(prefix + p.getKey(), p.getValue()));
        for (Pair<String, Block> child : actual.getChildren()) {
            String name = child.getKey();
            if (child.getValue() instanceof Checkpointed && name.matches("\\d+Checkpointed")) {
                String own = Checkpointed.unwrap(child.getValue()).getClass().getSimpleName();
                name = name.replace("Checkpointed", own);
            }
            collect(child.getValue(), prefix + name + '_', to);
        }
    }
}
