package org.djlmoe.expert;

import ai.djl.ndarray.NDArray;
import ai.djl.nn.Parameter;
import java.util.ArrayList;
import java.util.List;
import org.djlmoe.kernel.HalfArrays;

/**
 * Adapters that were added to their experts' weights for a while, say to evaluate or to save the
 * merged model. Closing copies the former weights back, so that they are what they were to the bit;
 * subtracting the products would not give that. The adapters then act again.
 *
 * <p>The copy takes as much memory as the weights. Where that is too much, merge for good and load
 * the base model again.
 */
public final class MergedAdapters implements AutoCloseable {

    private final Experts experts;
    private final LoraExperts adapters;
    private final List<NDArray> copies = new ArrayList<>();
    private final long changed;
    private boolean closed;

    MergedAdapters(Experts experts) {
        this.experts = experts;
        this.adapters = experts.adapters();
        boolean merged = false;
        try {
            for (Parameter parameter : weights()) {
                try (NDArray detached = parameter.getArray().stopGradient()) {
                    copies.add(detached.duplicate());
                }
            }
            changed = experts.mergeAdapters();
            merged = true;
        } finally {
            if (!merged) {
                restoreWeights();
            }
        }
    }

    private List<Parameter> weights() {
        return List.of(experts.gateUp(), experts.down());
    }

    /**
     * Returns how many weights the merge changed.
     *
     * @return elements
     */
    public long changed() {
        return changed;
    }

    /**
     * Puts the weights and the adapters back.
     *
     * @throws IllegalStateException if the experts have got other adapters, or weights of another
     *     type, in between
     */
    @Override
    public void close() {
        if (closed) {
            return;
        }
        if (experts.hasHalfWeights() != HalfArrays.isHalf(copies.get(0))) {
            throw new IllegalStateException(
                    "The weights' type has changed since the merge: undo that first");
        }
        experts.reattach(adapters);
        restoreWeights();
        closed = true;
    }

    private void restoreWeights() {
        for (int i = 0; i < copies.size(); i++) {
            HalfArrays.copy(weights().get(i).getArray(), copies.get(i));
            copies.get(i).close();
        }
    }
}
