package org.djlmoe.autograd;

import ai.djl.nn.Block;
import ai.djl.nn.Parameter;
import ai.djl.util.Pair;
import java.util.IdentityHashMap;
import java.util.LinkedHashMap;
import java.util.Map;

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
        collect(block, named);
        Map<String, String> wrapped = new LinkedHashMap<>();
        collectWrapped(block, "", "", wrapped);
        Map<String, Parameter> paths = new LinkedHashMap<>();
        Map<Parameter, String> seen = new IdentityHashMap<>();
        for (Pair<String, Parameter> entry : block.getParameters()) {
            Parameter parameter = entry.getValue();
            String path = named.getOrDefault(parameter, unwrapped(entry.getKey(), wrapped));
            if (seen.putIfAbsent(parameter, path) != null) {
                continue;
            }
            if (paths.putIfAbsent(path, parameter) != null) {
                throw new IllegalArgumentException(
                        "Two parameters are named "
                                + path
                                + "; let the block around both implement NamedParameters and tell"
                                + " them apart");
            }
        }
        return paths;
    }

    private static void collect(Block block, Map<Parameter, String> named) {
        Block actual = Checkpointed.unwrap(block);
        if (actual instanceof NamedParameters) {
            ((NamedParameters) actual)
                    .namedParameters()
                    .forEach((path, parameter) -> named.putIfAbsent(parameter, path));
        } else {
            actual.getChildren().values().forEach(child -> collect(child, named));
        }
    }

    /**
     * Collects the beginnings of DJL's names that a {@link Checkpointed} has changed, the longer
     * after the shorter, and what they would be without.
     */
    private static void collectWrapped(
            Block block, String prefix, String unwrapped, Map<String, String> changed) {
        for (Pair<String, Block> child : Checkpointed.unwrap(block).getChildren()) {
            String name = child.getKey();
            String own = name;
            String wrapper = Checkpointed.class.getSimpleName();
            if (child.getValue() instanceof Checkpointed && name.endsWith(wrapper)) {
                own =
                        name.substring(0, name.length() - wrapper.length())
                                + Checkpointed.unwrap(child.getValue()).getClass().getSimpleName();
            }
            String before = prefix + name + '_';
            String after = unwrapped + own + '_';
            if (!before.equals(after)) {
                changed.put(before, after);
            }
            collectWrapped(child.getValue(), before, after, changed);
        }
    }

    private static String unwrapped(String name, Map<String, String> changed) {
        String path = name;
        for (Map.Entry<String, String> entry : changed.entrySet()) {
            if (name.startsWith(entry.getKey())) {
                path = entry.getValue() + name.substring(entry.getKey().length());
            }
        }
        return path;
    }
}
