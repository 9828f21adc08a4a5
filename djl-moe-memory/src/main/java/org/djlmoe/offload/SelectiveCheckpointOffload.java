package org.djlmoe.offload;

import ai.djl.metric.Metrics;
import ai.djl.metric.Unit;
import ai.djl.ndarray.NDManager;
import ai.djl.training.Trainer;
import ai.djl.training.listener.TrainingListenerAdapter;
import java.nio.file.Path;
import java.util.function.Supplier;
import org.djlmoe.autograd.BoundaryPolicy;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.autograd.WorkerThread;
import org.djlmoe.tier.FileTier;
import org.djlmoe.tier.HostTier;
import org.djlmoe.tier.SlotTier;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Selective checkpoint offload (SCO): the inputs of segments leave the device after forward and
 * come back one ahead of their backward.
 *
 * <p>A training listener: added to the configuration of a {@link BoundedTrainer} it installs
 * itself.
 *
 * <p>The idea: of depth x length boundaries only one or two are in use at any moment. Each is
 * written to a tier while the next segment runs forward, and then its memory is freed, even where
 * the model's lists still refer to it; a late read brings it back. In backward, boundaries are
 * fetched one segment ahead. The earliest segments go first, until the budget is spent; the rest
 * stays on the device.
 *
 * <p>Bound: beside boundaries that stay on the device, three at a time: forward, one being written,
 * the input and the output of the running segment; backward, the running segment's and the one
 * fetched for the next.
 *
 * <p>What stays on the device:
 *
 * <ul>
 *   <li>what the budget does not hold, and arrays below a minimum size;
 *   <li>inputs that no segment made, views made of a segment's output included: keep reshapes
 *       inside segments;
 *   <li>what an operation outside segments needs for its own backward, such as the input of a
 *       {@code Linear} that is not checkpointed.
 * </ul>
 *
 * <p>When not to use it: with short sequences the repeated forward inside backward sets the peak,
 * not the boundaries, and nothing is gained. With the CPU as device the host tier frees nothing,
 * since host and device memory are the same; there the file tier is what helps.
 *
 * <p>Metrics, one value a gradient collector, if the trainer has {@link Metrics}: {@code
 * boundary-bytes-out}, {@code boundary-bytes-back}, {@code boundary-wait} (milliseconds that the
 * training thread waited for the tier), {@code boundary-peak-bytes}.
 */
public final class SelectiveCheckpointOffload extends TrainingListenerAdapter {

    private static final Logger logger = LoggerFactory.getLogger(SelectiveCheckpointOffload.class);

    private final long budget;
    private final long minBytes;
    private final Supplier<SlotTier> tiers;
    private BoundedTrainer trainer;
    private SlotPool pool;
    private WorkerThread thread;
    private OffloadStatistics lastSession = new OffloadStatistics(0, 0, 0, 0);

    private SelectiveCheckpointOffload(Builder builder) {
        budget = builder.budget;
        minBytes = builder.minBytes;
        tiers = builder.tiers;
    }

    /**
     * Creates a builder.
     *
     * @return the builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Installs itself on a {@link BoundedTrainer}. Other trainers have no segments: they train as
     * ever, and the log says so.
     *
     * @throws IllegalArgumentException if the tier has less room than the budget
     * @throws IllegalStateException if it is installed on another trainer that is still open
     */
    @Override
    public void onTrainingBegin(Trainer begun) {
        if (!(begun instanceof BoundedTrainer)) {
            logger.warn(
                    "SelectiveCheckpointOffload moves nothing under {}: train with BoundedTrainer",
                    begun.getClass().getSimpleName());
            return;
        }
        if (trainer != null) {
            throw new IllegalStateException(
                    "This SelectiveCheckpointOffload is installed on another trainer: close that one,"
                            + " or give each its own");
        }
        SlotTier tier = tiers.get();
        long available = tier.available();
        if (available < budget) {
            tier.close();
            throw new IllegalArgumentException(
                    "The offload budget is "
                            + budget
                            + " bytes, but its tier has room for "
                            + available
                            + ": set a smaller budget or name another directory");
        }
        trainer = (BoundedTrainer) begun;
        pool = new SlotPool(tier, budget);
        thread = new WorkerThread("boundary-offload");
        trainer.setBoundaryPolicy(this::open);
    }

    private BoundaryPolicy.Session open(NDManager manager) {
        return new OffloadSession(manager, pool, thread, minBytes, this::report);
    }

    private void report(OffloadStatistics session) {
        lastSession = session;
        Metrics metrics = trainer == null ? null : trainer.getMetrics();
        if (metrics != null) {
            metrics.addMetric("boundary-bytes-out", session.bytesOut(), Unit.BYTES);
            metrics.addMetric("boundary-bytes-back", session.bytesBack(), Unit.BYTES);
            metrics.addMetric("boundary-wait", session.waitSeconds() * 1000, Unit.MILLISECONDS);
            metrics.addMetric("boundary-peak-bytes", session.peakBytes(), Unit.BYTES);
        }
    }

    /** Frees the tier. Arrays whose values lie in it can no longer be read. */
    @Override
    public void onTrainingEnd(Trainer ended) {
        if (trainer == null || ended != trainer) {
            return;
        }
        trainer.setBoundaryPolicy(BoundaryPolicy.ON_DEVICE);
        trainer = null;
        thread.close();
        pool.close();
    }

    /**
     * Returns what the gradient collector that closed last has moved.
     *
     * @return the figures, zeros before the first
     */
    public OffloadStatistics lastSession() {
        return lastSession;
    }

    /**
     * Returns how much of the budget is taken by slots, idle ones included.
     *
     * @return bytes
     */
    public long allocatedBytes() {
        return pool == null ? 0 : pool.allocated();
    }

    SlotPool pool() {
        return pool;
    }

    /** Builds a {@link SelectiveCheckpointOffload}. */
    public static final class Builder {

        private long budget = -1;
        private long minBytes = 1 << 16;
        private Supplier<SlotTier> tiers = HostTier::new;

        private Builder() {}

        /**
         * Sets how much of the tier may be taken.
         *
         * @param bytes the budget, above 0
         * @return this builder
         */
        public Builder setBudget(long bytes) {
            this.budget = bytes;
            return this;
        }

        /**
         * Sets the tier to host memory, which is the default.
         *
         * @return this builder
         */
        public Builder optHostTier() {
            this.tiers = HostTier::new;
            return this;
        }

        /**
         * Sets the tier to files.
         *
         * @param directory an existing, writable folder on a disk
         * @return this builder
         * @throws IllegalArgumentException if it is none, or lies in memory
         */
        public Builder optFileTier(Path directory) {
            new FileTier(directory).close();
            this.tiers = () -> new FileTier(directory);
            return this;
        }

        /**
         * Sets a tier of one's own.
         *
         * @param tiers makes the tier when training begins; it is closed when training ends
         * @return this builder
         */
        public Builder optTier(Supplier<SlotTier> tiers) {
            this.tiers = tiers;
            return this;
        }

        /**
         * Sets the size below which an array stays on the device.
         *
         * @param bytes the smallest size that is moved, 64 KiB by default
         * @return this builder
         */
        public Builder optMinBytes(long bytes) {
            this.minBytes = bytes;
            return this;
        }

        /**
         * Builds the listener.
         *
         * @return the listener
         */
        public SelectiveCheckpointOffload build() {
            if (budget <= 0) {
                throw new IllegalArgumentException(
                        "setBudget takes the bytes that boundaries may take in the tier, above 0"
                                + (budget == -1 ? "; it was not called" : ", got " + budget));
            }
            if (minBytes < 0) {
                throw new IllegalArgumentException("optMinBytes must not be negative: " + minBytes);
            }
            return new SelectiveCheckpointOffload(this);
        }
    }
}
