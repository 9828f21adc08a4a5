package org.djlmoe.plan;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.GradientCollector;
import ai.djl.training.tracker.Tracker;
import java.util.Arrays;
import java.util.Random;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.expert.LoraExperts;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.model.MoeDecoder;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.optimizer.OffloadStreamAdamW;
import org.djlmoe.routing.MaskLogits;
import org.djlmoe.routing.SelectionPrior;
import org.djlmoe.vocab.RingDtpLoss;

/** Trains a decoder on noise for a few steps, as a plan describes it, and measures the peak. */
final class TrainedDecoder {

    private TrainedDecoder() {}

    /** Whether this process was started with an allocator that returns freed memory. */
    static boolean returnsMemory() {
        String threshold = System.getenv("MALLOC_MMAP_THRESHOLD_");
        return threshold != null && Long.parseLong(threshold) <= 1 << 20;
    }

    /** Loads the engine, compiles the kernels and warms the libraries up, on a tiny model. */
    static void warmUp() {
        MoeConfig tiny =
                MoeConfig.builder()
                        .setVocabSize(64)
                        .setHiddenSize(32)
                        .setIntermediateSize(32)
                        .setNumLayers(1)
                        .setNumHeads(2)
                        .setNumExperts(4)
                        .setTopK(2)
                        .build();
        train(tiny, PlanSettings.builder().setBatch(2).setSequence(16).build(), 2, false);
    }

    static PeakMeter.Reading measure(
            MoeConfig config, PlanSettings settings, int steps, boolean skew) {
        System.gc();
        try (PeakMeter meter = PeakMeter.start()) {
            train(config, settings, steps, skew);
            return meter.stop();
        }
    }

    /**
     * Returns the last loss.
     *
     * @param skew whether all tokens go to the same experts
     */
    static float train(MoeConfig config, PlanSettings settings, int steps, boolean skew) {
        Random random = new Random(1);
        RingDtpLoss loss =
                RingDtpLoss.builder().optBlockTokens(settings.vocabBlockTokens()).build();
        float last = Float.NaN;
        try (Model model = Model.newInstance("decoder", Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer =
                        OffloadStreamAdamW.builder()
                                .setLearningRateTracker(Tracker.fixed(1e-3f))
                                .optClipNorm(1)
                                .build()) {
            MoeDecoder decoder =
                    MoeDecoder.builder()
                            .setConfig(config)
                            .optChunkTokens(settings.moeChunkTokens())
                            .optMaxChunks(settings.maxChunks())
                            .optSharedExperts(settings.sharedWidth(), settings.sharedGate())
                            .optBalanceCoefficient(0.01)
                            .optZCoefficient(0.001)
                            .build();
            if (skew) {
                boolean[] kept = new boolean[config.numExperts()];
                Arrays.fill(kept, 0, config.topK(), true);
                decoder.moeBlocks()
                        .forEach(block -> block.router().setPrior(kept, SelectionPrior.hardMask()));
            }
            if (settings.trainsMask()) {
                attachMasks(decoder, model.getNDManager(), settings.excludedExperts());
            }
            if (settings.frozenHalf()) {
                decoder.moeBlocks()
                        .forEach(block -> block.experts().narrowWeights(model.getNDManager()));
            }
            model.setBlock(decoder);
            DefaultTrainingConfig training =
                    new DefaultTrainingConfig(loss)
                            .optOptimizer(optimizer)
                            .optDevices(new Device[] {Device.cpu()});
            Shape shape = new Shape(settings.batch(), settings.sequence());
            try (BoundedTrainer trainer = new BoundedTrainer(model, training)) {
                trainer.initialize(shape);
                if (settings.trained() == PlanSettings.Trained.ROUTERS_AND_ADAPTERS) {
                    attachAdapters(decoder, trainer.getManager(), settings.loraRank());
                }
                for (int step = 0; step < steps; step++) {
                    try (NDManager batch = trainer.getManager().newSubManager()) {
                        NDArray ids = tokens(batch, shape, config.vocabSize(), random);
                        NDArray labels = tokens(batch, shape, config.vocabSize(), random);
                        if (settings.evaluation()) {
                            NDList out = trainer.evaluate(new NDList(ids));
                            try (GradMode off = GradMode.off()) {
                                last = loss.evaluate(new NDList(labels), out).getFloat();
                            }
                            continue;
                        }
                        try (GradientCollector collector = trainer.newGradientCollector()) {
                            NDList out = trainer.forward(new NDList(ids));
                            NDArray value = loss.evaluate(new NDList(labels), out);
                            last = value.getFloat();
                            collector.backward(value);
                        }
                        trainer.step();
                    }
                }
            }
        }
        return last;
    }

    /** Only routers and adapters train from now on. */
    private static void attachAdapters(MoeDecoder decoder, NDManager manager, int rank) {
        decoder.getParameters().forEach(pair -> pair.getValue().freeze(true));
        for (MoeBlock block : decoder.moeBlocks()) {
            block.router().weight().freeze(false);
            LoraExperts adapters = block.experts().attachAdapters(rank, 2.0 * rank);
            adapters.initialize(manager, DataType.FLOAT32, new Shape(-1, 1));
        }
    }

    private static void attachMasks(MoeDecoder decoder, NDManager manager, int excluded) {
        boolean[] kept = new boolean[decoder.config().numExperts()];
        Arrays.fill(kept, 0, decoder.config().topK(), true);
        double[] slopes = new double[kept.length];
        Arrays.fill(slopes, 1);
        for (MoeBlock block : decoder.moeBlocks()) {
            MaskLogits mask = block.router().attachMask();
            mask.initialize(manager, DataType.FLOAT32, new Shape(1));
            block.router().setPrior(kept, SelectionPrior.hardMask());
            mask.setSlopes(slopes, excluded);
        }
    }

    private static NDArray tokens(NDManager manager, Shape shape, int vocab, Random random) {
        long[] ids = new long[(int) shape.size()];
        for (int i = 0; i < ids.length; i++) {
            ids[i] = random.nextInt(vocab);
        }
        return manager.create(ids, shape).toType(DataType.INT64, false);
    }
}
