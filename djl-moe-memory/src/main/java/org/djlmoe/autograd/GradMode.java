package org.djlmoe.autograd;

import ai.djl.pytorch.jni.JniUtils;

/**
 * Sets the calling thread's gradient mode for the length of a try statement.
 *
 * <p>The mode belongs to the thread, and a new thread starts with it on: a worker that computes on
 * arrays switches it off first, or it records graphs that nobody frees.
 */
public final class GradMode implements AutoCloseable {

    private final boolean before;

    private GradMode(boolean on) {
        before = JniUtils.isGradMode();
        JniUtils.setGradMode(on);
    }

    /**
     * Switches recording off until the result is closed.
     *
     * @return what restores the mode
     */
    public static GradMode off() {
        return new GradMode(false);
    }

    /**
     * Switches recording on until the result is closed.
     *
     * @return what restores the mode
     */
    public static GradMode on() {
        return new GradMode(true);
    }

    /**
     * Returns whether the calling thread records.
     *
     * @return true if operations on arrays that require gradients are recorded
     */
    public static boolean isOn() {
        return JniUtils.isGradMode();
    }

    @Override
    public void close() {
        JniUtils.setGradMode(before);
    }
}
