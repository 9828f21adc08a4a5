package org.djlmoe.optimizer;

import ai.djl.ndarray.NDArray;
import ai.djl.nn.Block;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;
import java.util.function.Consumer;
import java.util.function.Supplier;
import org.djlmoe.autograd.Gradients;
import org.djlmoe.autograd.ParameterPaths;

/**
 * Finds the steps in what DJL's trainer hands over: one gradient at a time, named by an id, and no
 * word of where a step begins.
 *
 * <p>With the block known, a step has the parameters that have a gradient when it begins, and an id
 * that is not expected (any more) begins the next. Without, a repeated id does.
 */
final class GradientSequence {

    private Supplier<Block> block;

    /** Paths by DJL's ids, learned from the block at the first id that is not in it. */
    private final Map<String, String> paths = new HashMap<>();

    /** With a block: the ids of the current step that are still to come. */
    private final Set<String> pending = new HashSet<>();

    /** Without: those that have been. */
    private final Set<String> seen = new HashSet<>();

    private boolean namedById;

    /**
     * Creates a sequence.
     *
     * @param block the block that is trained, or null if it is not known
     */
    GradientSequence(Supplier<Block> block) {
        this.block = block;
    }

    /**
     * Returns the path of a parameter, or its id where no block is known.
     *
     * @throws IllegalArgumentException if the block is known and the parameter is not in it
     */
    String path(String id) {
        if (block == null) {
            return id;
        }
        if (!paths.containsKey(id)) {
            ParameterPaths.of(block.get())
                    .forEach((path, parameter) -> paths.put(parameter.getId(), path));
        }
        String path = paths.get(id);
        if (path == null) {
            throw new IllegalArgumentException(
                    "The parameter with the id "
                            + id
                            + " is not in the block that the optimizer was given: give it the whole"
                            + " model that is trained, with optModel(model) or optBlock(block)");
        }
        return path;
    }

    /** Returns the block that parameters are looked up in, or null if it is not known. */
    Supplier<Block> block() {
        return block;
    }

    /** Returns whether gradients came that only an id of this process names. */
    boolean isNamedById() {
        return namedById;
    }

    /**
     * Takes the next gradient.
     *
     * @param id DJL's id of the parameter
     * @param path its path
     * @param gradient the gradient
     * @param begins is told of a step that begins with it: all gradients of the step by path, as
     *     far as they are known, and only for as long as it runs
     */
    void next(String id, String path, NDArray gradient, Consumer<Map<String, NDArray>> begins) {
        if (block == null) {
            namedById = true;
            if (seen.isEmpty() || seen.contains(id)) {
                seen.clear();
                begins.accept(Map.of(path, gradient));
            }
            seen.add(id);
        } else if (!pending.remove(id)) {
            begin(id, path, gradient, begins);
        }
    }

    private void begin(
            String id, String path, NDArray gradient, Consumer<Map<String, NDArray>> begins) {
        pending.clear();
        Map<String, NDArray> handles = new LinkedHashMap<>();
        Set<String> expected = new HashSet<>();
        try {
            ParameterPaths.of(block.get())
                    .forEach(
                            (name, parameter) -> {
                                NDArray handle = Gradients.of(parameter);
                                if (handle != null) {
                                    handles.put(name, handle);
                                    expected.add(parameter.getId());
                                }
                            });
            Map<String, NDArray> gradients = new LinkedHashMap<>(handles);
            // What is handed over counts, also where it is not the array that PyTorch keeps.
            gradients.put(path, gradient);
            begins.accept(gradients);
        } finally {
            handles.values().forEach(NDArray::close);
        }
        pending.addAll(expected);
        pending.remove(id);
    }

    /**
     * Has the next gradient begin a step, and parameters be looked up in a block from now on.
     *
     * @param trained the block
     */
    void restart(Block trained) {
        block = () -> trained;
        paths.clear();
        forgetStep();
    }

    /** Has the next gradient begin a step. */
    void forgetStep() {
        pending.clear();
        seen.clear();
    }
}
