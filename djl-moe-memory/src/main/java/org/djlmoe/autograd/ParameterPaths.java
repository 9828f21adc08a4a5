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
 * gives it, and otherwise DJL's name from {@link Block#getParameters()}.
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
        Map<String, Parameter> paths = new LinkedHashMap<>();
        Map<Parameter, String> seen = new IdentityHashMap<>();
        for (Pair<String, Parameter> entry : block.getParameters()) {
            Parameter parameter = entry.getValue();
            String path = named.getOrDefault(parameter, entry.getKey());
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
}
