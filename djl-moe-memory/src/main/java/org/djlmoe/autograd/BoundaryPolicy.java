package org.djlmoe.autograd;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import java.util.ArrayList;
import java.util.List;

/**
 * Decides where the inputs of recorded segments, the <i>boundaries</i>, lie between forward and
 * backward.
 *
 * <p>A {@link Tape} opens one session and tells it what happens, on the tape's own thread: {@link
 * Session#keep} before a segment's forward, {@link Boundaries#recorded} after it, {@link
 * Boundaries#beforeBackward} and {@link Boundaries#close} around its backward, {@link
 * Session#close} when the tape closes. Segments inside the backward of another one are treated
 * alike.
 */
public interface BoundaryPolicy {

    /** Boundaries stay where they are. */
    BoundaryPolicy ON_DEVICE = OnDevice::new;

    /**
     * Begins a session, the life of one tape.
     *
     * @param manager the tape's manager, under which the session may make its own
     * @return the session, closed by the tape before the manager
     */
    Session open(NDManager manager);

    /** The boundaries of one tape. */
    interface Session extends AutoCloseable {

        /**
         * Chooses what the caller gets of a segment's output.
         *
         * @param output the output, which has a history of one addition of {@code anchor}
         * @param anchor the leaf in which the output's gradient arrives
         * @return {@code output}, or an array of the same values and history that takes its place
         */
        NDArray handOut(NDArray output, NDArray anchor);

        /**
         * Takes the inputs of a segment that is about to run forward. The same array may come
         * several times, as input of several segments.
         *
         * @param inputs what the caller passed
         * @return what the tape keeps of them
         */
        Boundaries keep(NDList inputs);

        /** Releases everything that is left. It does not throw for want of a tier. */
        @Override
        void close();
    }

    /** The inputs of one recorded segment. */
    interface Boundaries extends AutoCloseable {

        /**
         * Returns the arrays. They are on the device before {@link #recorded} and after {@link
         * #beforeBackward}.
         *
         * @return the values of the inputs, without history
         */
        NDList arrays();

        /** Called when the segment's forward has run. */
        void recorded();

        /** Called when the segment's backward is about to run. */
        void beforeBackward();

        /** Called when the segment's backward has run, or never will; several times perhaps. */
        @Override
        void close();
    }

    /** The session of {@link #ON_DEVICE}. */
    record OnDevice(NDManager manager) implements Session {

        @Override
        public NDArray handOut(NDArray output, NDArray anchor) {
            return output;
        }

        @Override
        public Boundaries keep(NDList inputs) {
            NDManager home = manager.newSubManager();
            List<NDArray> arrays = new ArrayList<>();
            for (NDArray input : inputs) {
                arrays.add(withoutHistory(input, home));
            }
            return new Boundaries() {
                @Override
                public NDList arrays() {
                    return new NDList(arrays);
                }

                @Override
                public void recorded() {
                    // stays
                }

                @Override
                public void beforeBackward() {
                    // is there
                }

                @Override
                public void close() {
                    home.close();
                }
            };
        }

        @Override
        public void close() {
            // The tape's manager closes what is left.
        }
    }

    /**
     * Returns another handle of an array, without history and outside every scope.
     *
     * @param array the array
     * @param home the owner of the handle
     * @return the handle; it shares the array's memory
     */
    static NDArray withoutHistory(NDArray array, NDManager home) {
        NDArray plain = array.stopGradient();
        ai.djl.ndarray.NDScope.unregister(plain);
        plain.attach(home);
        return plain;
    }
}
