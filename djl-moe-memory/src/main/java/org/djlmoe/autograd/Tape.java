package org.djlmoe.autograd;

import ai.djl.engine.EngineException;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.NDScope;
import ai.djl.ndarray.types.DataType;
import ai.djl.pytorch.engine.PtNDArray;
import ai.djl.pytorch.jni.JniUtils;
import ai.djl.training.GradientCollector;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.IdentityHashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.function.Supplier;
import java.util.function.UnaryOperator;
import org.djlmoe.kernel.ArrayKernels;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * A gradient collector that runs the backward computations of {@linkplain Segment segments} in
 * reverse order.
 *
 * <p>The idea: a segment's forward runs without recording, and its output enters autograd as a new
 * variable with an <i>anchor</i>, a leaf without memory in which the output's gradient arrives.
 * Backward first runs autograd from the loss, which stops at the anchors; then, from the last
 * segment to the first, it takes the gradients of a segment's outputs, runs the segment's backward
 * and sends the gradients of its inputs on: straight to the segment that made the input, or through
 * autograd where other operations lie between. So operations of both kinds mix freely.
 *
 * <p>Segments nest: {@link #differentiate} runs a computation on a frame of its own, inside the
 * backward of another segment.
 *
 * <p>Bound: beside parameters and their gradients, what lives from forward to backward is each
 * segment's inputs (the boundaries) and what it saved, and what autograd keeps of operations
 * outside segments. A segment's share is released as soon as its backward has run.
 *
 * <p>Where boundaries lie meanwhile is decided by a {@link BoundaryPolicy}.
 *
 * <p>A residual connection around a segment is better put inside it: autograd runs once through
 * what lies upstream for each later segment that it feeds.
 *
 * <p>One tape at a time may be open on a thread, and it is used on that thread alone.
 */
public final class Tape implements GradientCollector {

    private static final Logger logger = LoggerFactory.getLogger(Tape.class);
    private static final ThreadLocal<Tape> CURRENT = new ThreadLocal<>();
    private static volatile boolean warned;

    private final NDManager manager;
    private final Runnable zeroGradients;
    private long seed;
    private final GradMode gradMode;
    private final BoundaryPolicy.Session boundaries;
    private final Deque<Frame> frames = new ArrayDeque<>();
    private long segments;
    private boolean failed;

    /**
     * Opens a tape on the calling thread.
     *
     * @param parent the manager under which the tape keeps its arrays
     * @param seed decides the random numbers of segments
     * @param zeroGradients sets the gradients of the model's parameters to zero
     * @throws IllegalStateException if this thread has an open tape
     */
    public Tape(NDManager parent, long seed, Runnable zeroGradients) {
        this(parent, seed, zeroGradients, BoundaryPolicy.ON_DEVICE);
    }

    /**
     * Opens a tape on the calling thread.
     *
     * @param parent the manager under which the tape keeps its arrays
     * @param seed decides the random numbers of segments
     * @param zeroGradients sets the gradients of the model's parameters to zero
     * @param policy where the inputs of segments lie until backward
     * @throws IllegalStateException if this thread has an open tape
     */
    public Tape(NDManager parent, long seed, Runnable zeroGradients, BoundaryPolicy policy) {
        if (CURRENT.get() != null) {
            throw new IllegalStateException(
                    "A tape is open on this thread already: close the other gradient collector first");
        }
        this.manager = parent.newSubManager();
        this.manager.setName("tape");
        this.seed = seed;
        this.zeroGradients = zeroGradients;
        this.boundaries = policy.open(manager);
        this.gradMode = GradMode.on();
        frames.push(new Frame());
        CURRENT.set(this);
    }

    /**
     * Runs a segment, recording it if a tape is open on this thread and gradient mode is on.
     *
     * @param segment the segment
     * @param inputs its inputs
     * @return its outputs, attached to the manager of the first input
     */
    public static NDList apply(Segment segment, NDList inputs) {
        Tape tape = CURRENT.get();
        if (!GradMode.isOn()) {
            return forwardOnly(tape, segment, inputs);
        }
        if (tape == null) {
            if (!warned) {
                warned = true;
                logger.warn(
                        "Gradients are being collected without a tape, so memory is not bounded. Train with"
                                + " BoundedTrainer, or switch gradient mode off on this thread for inference.");
            }
            return segment.plain(inputs);
        }
        return tape.frames.peek().record(segment, inputs);
    }

    private static NDList forwardOnly(Tape tape, Segment segment, NDList inputs) {
        NDManager owner = inputs.head().getManager();
        NDList outputs;
        long own = tape == null ? SegmentContext.NO_SEED : tape.nextSeed();
        try (NDScope scope = new NDScope();
                SegmentContext context = new SegmentContext(owner, own, false)) {
            outputs =
                    tape == null
                            ? segment.forward(context, inputs)
                            : tape.seeded(own, () -> segment.forward(context, inputs));
            NDScope.unregister(outputs);
            outputs.attach(owner);
        }
        outputs.forEach(NDScope::register);
        return outputs;
    }

    /**
     * Computes the product of gradients of outputs with the derivative of a computation, by running
     * it once more.
     *
     * <p>For use in {@link Segment#backward}. Gradients of parameters are added to their {@code
     * .grad}.
     *
     * @param computation the computation; segments in it are recorded on a frame of their own
     * @param inputs its inputs, without history
     * @param outputGradients one a output, null where it had no influence
     * @return the gradients of the inputs, null for those that have none
     */
    public static NDList differentiate(
            UnaryOperator<NDList> computation, NDList inputs, NDList outputGradients) {
        Tape tape = CURRENT.get();
        if (tape == null) {
            throw new IllegalStateException("differentiate() needs an open tape on this thread");
        }
        Frame frame = tape.new Frame();
        tape.frames.push(frame);
        try {
            NDList leaves = new NDList();
            for (NDArray input : inputs) {
                NDArray leaf = input.stopGradient();
                if (leaf.getDataType().isFloating()) {
                    leaf.setRequiresGradient(true);
                }
                leaves.add(leaf);
            }
            NDList outputs;
            try (GradMode on = GradMode.on()) {
                outputs = computation.apply(leaves);
            }
            for (int i = 0; i < outputs.size(); i++) {
                if (outputGradients.get(i) != null) {
                    frame.send(outputs.get(i), outputGradients.get(i));
                }
            }
            frame.unwind();
            NDList gradients = new NDList();
            for (NDArray leaf : leaves) {
                gradients.add(
                        leaf.getDataType().isFloating()
                                ? JniUtils.getGradient((PtNDArray) leaf)
                                : null);
            }
            return gradients;
        } finally {
            tape.frames.pop();
            frame.close();
        }
    }

    @Override
    public void backward(NDArray target) {
        if (CURRENT.get() != this) {
            throw new IllegalStateException(
                    "backward() on a tape that is closed or of another thread");
        }
        Frame frame = frames.peek();
        if (frame.linkOf(target) == null) {
            throw new IllegalStateException(
                    "backward() has nowhere to go: nothing that this array was computed from gets a"
                            + " gradient. Is everything frozen, or was it computed with gradient mode"
                            + " off or by evaluate()?");
        }
        try (NDArray ones = target.onesLike()) {
            frame.send(target, ones);
            frame.unwind();
            frame.requireNothingCameLate();
        } catch (RuntimeException | Error e) {
            failed = true;
            throw e;
        }
    }

    @Override
    public void zeroGradients() {
        zeroGradients.run();
    }

    /**
     * Releases everything that the tape still holds. After a failed backward the gradients are set
     * to zero.
     */
    @Override
    public void close() {
        if (CURRENT.get() != this) {
            return;
        }
        CURRENT.remove();
        try {
            frames.forEach(Frame::close);
            frames.clear();
            boundaries.close();
            manager.close();
            if (failed) {
                zeroGradients.run();
            }
        } finally {
            gradMode.close();
        }
    }

    /**
     * Runs the forward or the backward of a segment with a given seed. Segments inside it draw
     * theirs from that seed, so that they draw the same when the segment is run again.
     */
    private NDList seeded(long own, Supplier<NDList> pass) {
        long outerSeed = seed;
        long outerSegments = segments;
        seed = own;
        segments = 0;
        try {
            return pass.get();
        } finally {
            seed = outerSeed;
            segments = outerSegments;
        }
    }

    private long nextSeed() {
        // SplitMix64: neighbouring counts give unrelated seeds.
        long z = seed + 0x9E3779B97F4A7C15L * ++segments;
        z = (z ^ (z >>> 30)) * 0xBF58476D1CE4E5B9L;
        z = (z ^ (z >>> 27)) * 0x94D049BB133111EBL;
        return (z ^ (z >>> 31)) >>> 1;
    }

    /**
     * One level of nesting: the segments recorded since a computation began, oldest at the bottom.
     */
    private final class Frame implements AutoCloseable {

        private final Deque<Recorded> stack = new ArrayDeque<>();
        private final Map<NDArray, Link> links = new IdentityHashMap<>();

        /** Anchors of segments whose backward has run: no gradient may reach them any more. */
        private final List<NDArray> spent = new ArrayList<>();

        NDList record(Segment segment, NDList inputs) {
            List<Link> sources = new ArrayList<>();
            inputs.forEach(input -> sources.add(linkOf(input)));
            if (!segment.hasTrainableParameters() && sources.stream().allMatch(Objects::isNull)) {
                try (GradMode off = GradMode.off()) {
                    return forwardOnly(Tape.this, segment, inputs);
                }
            }
            sources.replaceAll(link -> link == null ? null : link.own(manager));
            NDManager owner = inputs.head().getManager();
            SegmentContext context = new SegmentContext(manager, nextSeed(), true);
            BoundaryPolicy.Boundaries kept = null;
            try {
                NDList outputs;
                Recorded recorded;
                try (NDScope scope = new NDScope();
                        GradMode off = GradMode.off()) {
                    kept = boundaries.keep(inputs);
                    recorded = new Recorded(segment, context, kept, sources);
                    NDList arrays = kept.arrays();
                    outputs =
                            anchored(
                                    seeded(context.seed(), () -> segment.forward(context, arrays)),
                                    recorded);
                    // Out of the inputs' managers, which may go with the inputs.
                    outputs.attach(owner);
                    kept.recorded();
                    NDScope.unregister(outputs);
                }
                for (int i = 0; i < outputs.size(); i++) {
                    NDArray output = outputs.get(i);
                    links.put(output, new Link(recorded, i, null, ArrayKernels.version(output)));
                    NDScope.register(outputs.get(i));
                }
                stack.push(recorded);
                return outputs;
            } catch (RuntimeException | Error e) {
                sources.forEach(Link::release);
                context.close();
                if (kept != null) {
                    kept.close();
                }
                throw e;
            }
        }

        private NDList anchored(NDList made, Recorded recorded) {
            NDList outputs = new NDList();
            for (NDArray output : made) {
                DataType type = output.getDataType();
                if (!type.isFloating() && type != DataType.UNKNOWN) {
                    recorded.anchors.add(null);
                    outputs.add(output.stopGradient());
                    continue;
                }
                NDList pair;
                try (GradMode on = GradMode.on()) {
                    pair = AutogradKernels.anchor(output.getManager(), output);
                }
                NDArray anchor = pair.get(1);
                NDScope.unregister(anchor);
                anchor.attach(manager);
                recorded.anchors.add(anchor);
                outputs.add(boundaries.handOut(pair.get(0), anchor));
            }
            recorded.direct = new NDArray[outputs.size()];
            return outputs;
        }

        /**
         * Where the gradient of an input goes: to the segment that made it, to autograd, or
         * nowhere.
         */
        private Link linkOf(NDArray input) {
            Link link = links.get(input);
            // What a caller has changed in place is no longer what the segment made: autograd knows
            // the way.
            if (link != null && boundaries.isUnchanged(input, link.version())) {
                return link;
            }
            return ArrayKernels.requiresGradient(input) ? new Link(null, 0, input, 0) : null;
        }

        void send(NDArray target, NDArray gradient) {
            Link link = linkOf(target);
            if (link != null) {
                link.send(gradient, false);
            }
        }

        /** Runs the backward of every segment that a gradient has reached, last first. */
        void unwind() {
            Iterator<Recorded> newestFirst = stack.iterator();
            while (newestFirst.hasNext()) {
                Recorded recorded = newestFirst.next();
                if (recorded.backward(Tape.this)) {
                    newestFirst.remove();
                    recorded.anchors.stream().filter(Objects::nonNull).forEach(spent::add);
                }
            }
        }

        /** A gradient that arrives at a segment after its backward would be lost without a word. */
        void requireNothingCameLate() {
            try (NDScope scope = new NDScope()) {
                for (NDArray anchor : spent) {
                    NDArray late = JniUtils.getGradient((PtNDArray) anchor);
                    if (late != null && AutogradKernels.isLate(late)) {
                        throw new IllegalStateException(Recorded.SECOND_BACKWARD);
                    }
                }
            }
        }

        @Override
        public void close() {
            stack.forEach(Recorded::close);
            stack.forEach(r -> r.anchors.stream().filter(Objects::nonNull).forEach(NDArray::close));
            stack.clear();
            spent.forEach(NDArray::close);
            spent.clear();
            links.clear();
        }
    }

    /**
     * The destination of a gradient: output {@code index} of a recorded segment, or an array known
     * to autograd.
     */
    private record Link(Recorded source, int index, NDArray array, long version) {

        /** Keeps the array for itself: the caller may close its handle before backward. */
        Link own(NDManager manager) {
            if (source != null) {
                return this;
            }
            try (NDScope scope = new NDScope()) {
                NDArray alias = ArrayKernels.alias(manager, array);
                NDScope.unregister(alias);
                return new Link(null, index, alias, version);
            }
        }

        static void release(Link link) {
            if (link != null && link.array != null) {
                link.array.close();
            }
        }

        /**
         * Sends a gradient on.
         *
         * @param handedOver whether the destination may keep the array
         */
        void send(NDArray gradient, boolean handedOver) {
            if (source != null) {
                source.receive(index, gradient, handedOver);
                return;
            }
            try {
                if (handedOver) {
                    AutogradKernels.backwardHandingOver(array, gradient);
                } else {
                    JniUtils.backward((PtNDArray) array, (PtNDArray) gradient, true, false);
                }
            } catch (EngineException e) {
                if (e.getMessage() != null && e.getMessage().contains("size of tensor a (0)")) {
                    throw new IllegalStateException(Recorded.SECOND_BACKWARD, e);
                }
                throw e;
            }
        }
    }

    /** A segment that has run forward, until its backward has run. */
    private static final class Recorded implements AutoCloseable {

        static final String SECOND_BACKWARD =
                "backward() reached a segment whose backward has run already. Add the losses and call backward()"
                        + " once, or run the forward pass again.";

        final Segment segment;
        final SegmentContext context;
        final BoundaryPolicy.Boundaries boundaries;
        final List<Link> inputs;
        final List<NDArray> anchors = new ArrayList<>();
        NDArray[] direct;
        private boolean done;

        Recorded(
                Segment segment,
                SegmentContext context,
                BoundaryPolicy.Boundaries boundaries,
                List<Link> inputs) {
            this.segment = segment;
            this.context = context;
            this.boundaries = boundaries;
            this.inputs = inputs;
        }

        void receive(int output, NDArray gradient, boolean handedOver) {
            if (done) {
                throw new IllegalStateException(SECOND_BACKWARD);
            }
            if (direct[output] == null) {
                // Otherwise the sender closes or overwrites its array, and an array of zero stride
                // cannot be added to.
                NDArray own = handedOver ? gradient : gradient.duplicate();
                NDScope.unregister(own);
                own.attach(context.manager());
                direct[output] = own;
            } else {
                direct[output].addi(gradient);
                if (handedOver) {
                    gradient.close();
                }
            }
        }

        /**
         * Returns false, and leaves everything as it is, if no gradient has reached this segment.
         */
        boolean backward(Tape tape) {
            try (NDScope scope = new NDScope();
                    GradMode off = GradMode.off()) {
                NDList gradients = new NDList();
                List<NDArray> arrived = new ArrayList<>();
                for (int i = 0; i < direct.length; i++) {
                    NDArray anchor = anchors.get(i);
                    NDArray gradient =
                            anchor == null ? null : JniUtils.getGradient((PtNDArray) anchor);
                    if (gradient != null) {
                        arrived.add(gradient);
                    }
                    if (direct[i] != null) {
                        // Not the other way round: autograd may have left the same memory as the
                        // gradient of something else.
                        if (gradient != null) {
                            direct[i].addi(gradient);
                        }
                        gradient = direct[i];
                    }
                    gradients.add(gradient);
                }
                if (gradients.stream().allMatch(Objects::isNull)) {
                    return false;
                }
                done = true;
                boundaries.beforeBackward();
                NDList inputGradients =
                        tape.seeded(
                                context.seed(),
                                () -> segment.backward(context, boundaries.arrays(), gradients));
                for (int i = 0; i < inputs.size(); i++) {
                    NDArray gradient = inputGradients.get(i);
                    if (inputs.get(i) != null && gradient != null) {
                        boolean shared = isShared(i, inputGradients);
                        inputs.get(i)
                                .send(
                                        shared ? gradient.duplicate() : gradient,
                                        shared || context.isHandedOver(gradient));
                    }
                }
                // The caller's outputs keep the anchors alive; their gradients must not stay with
                // them.
                arrived.forEach(AutogradKernels::release);
            }
            close();
            return true;
        }

        /**
         * Returns whether a gradient is also that of an earlier input, or an input itself: a leaf
         * upstream may keep its memory and have further gradients added to it.
         */
        private boolean isShared(int index, NDList inputGradients) {
            NDArray gradient = inputGradients.get(index);
            return inputGradients.subList(0, index).stream()
                            .anyMatch(other -> sharesMemory(gradient, other))
                    || boundaries.arrays().stream().anyMatch(one -> sharesMemory(gradient, one));
        }

        private static boolean sharesMemory(NDArray gradient, NDArray other) {
            return other != null
                    && !(other instanceof PtNDArray closed && closed.isReleased())
                    && AutogradKernels.shareMemory(gradient, other);
        }

        @Override
        public void close() {
            context.close();
            boundaries.close();
            inputs.forEach(Link::release);
            inputs.clear();
        }
    }
}
