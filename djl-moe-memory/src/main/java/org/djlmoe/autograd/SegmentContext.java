package org.djlmoe.autograd;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.NDScope;
import ai.djl.pytorch.engine.PtNDArray;
import ai.djl.pytorch.jni.JniUtils;
import java.util.Collections;
import java.util.HashMap;
import java.util.IdentityHashMap;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import org.djlmoe.kernel.ArrayKernels;

/**
 * What one use of a segment keeps from forward to backward, and its access to the gradients of
 * parameters.
 */
public final class SegmentContext implements AutoCloseable {

    /** The seed where no tape is open, and so nothing will have to be repeated. */
    static final long NO_SEED = -1;

    private final NDManager manager;
    private final long seed;
    private final boolean recording;
    private final Map<String, NDArray> saved = new HashMap<>();
    private final Set<NDArray> handedOver = Collections.newSetFromMap(new IdentityHashMap<>());

    SegmentContext(NDManager parent, long seed, boolean recording) {
        this.manager = parent.newSubManager();
        this.seed = seed;
        this.recording = recording;
    }

    /**
     * Returns whether there will be a backward. Where not, there is no need to save anything.
     *
     * @return true if the tape records this segment
     */
    public boolean isRecording() {
        return recording;
    }

    /**
     * Returns a number that is the segment's own, the same whenever it is run again for backward.
     *
     * @return a seed for dropout and the like, at least 0; negative if no tape is open, so that
     *     nothing will be repeated
     */
    public long seed() {
        return seed;
    }

    /**
     * Keeps an array until the segment's backward has run.
     *
     * @param name the name to get it back by
     * @param array the array; the context owns it from now on
     */
    public void save(String name, NDArray array) {
        NDScope.unregister(array);
        array.attach(manager);
        saved.put(name, array);
    }

    /**
     * Returns a saved array.
     *
     * @param name the name given to {@link #save}
     * @return the array
     */
    public NDArray get(String name) {
        NDArray array = saved.get(name);
        if (array == null) {
            throw new IllegalStateException("The segment saved no array named " + name);
        }
        return array;
    }

    /**
     * Returns an array that may have been saved.
     *
     * @param name the name given to {@link #save}
     * @return the array, empty if the segment saved none of that name
     */
    public Optional<NDArray> find(String name) {
        return Optional.ofNullable(saved.get(name));
    }

    /**
     * Returns the gradient of a parameter's array, to add to in place. It is made, as zeros, if
     * there was none.
     *
     * @param weight the parameter's array, or another handle of it
     * @return the gradient, or null if the array does not require one; it lives until the segment's
     *     backward ends
     * @throws IllegalArgumentException if the array was computed from others
     */
    public NDArray gradient(NDArray weight) {
        if (!ArrayKernels.requiresGradient(weight)) {
            return null;
        }
        PtNDArray gradient = JniUtils.getGradient((PtNDArray) weight);
        if (gradient == null) {
            // Only a backward makes .grad; autograd copies the zeros, which are a single one.
            try (PtNDArray zeros = (PtNDArray) AutogradKernels.zeros(manager, weight)) {
                JniUtils.backward((PtNDArray) weight, zeros, false, false);
            }
            gradient = JniUtils.getGradient((PtNDArray) weight);
            if (gradient == null) {
                throw new IllegalArgumentException(
                        "Only a parameter has a gradient to add to; an array computed from others must"
                                + " be an input of the segment");
            }
        }
        return gradient;
    }

    /**
     * Declares, in {@link Segment#backward}, that an array which it returns as the gradient of an
     * input is not needed any more. Whoever the gradient is for then keeps the array itself instead
     * of a copy, and adds to it in place.
     *
     * @param gradient a contiguous array whose memory nobody else refers to: neither an input, a
     *     weight or a gradient of the segment, nor another array that it returns, nor Java values
     * @return the same array
     */
    public NDArray handOver(NDArray gradient) {
        handedOver.add(gradient);
        return gradient;
    }

    boolean isHandedOver(NDArray gradient) {
        return handedOver.contains(gradient);
    }

    /**
     * Returns a manager whose arrays live until the segment's backward has run.
     *
     * @return the manager
     */
    public NDManager manager() {
        return manager;
    }

    @Override
    public void close() {
        saved.clear();
        handedOver.clear();
        manager.close();
    }
}
