package org.djlmoe.examples.bench;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.GradientCollector;
import ai.djl.training.optimizer.AdamW;
import ai.djl.training.optimizer.Optimizer;
import ai.djl.training.tracker.Tracker;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.autograd.Gradients;
import org.djlmoe.autograd.StepOptimizer.Slot;
import org.djlmoe.kernel.TorchKernels;
import org.djlmoe.optimizer.OffloadStreamAdamW;
import org.djlmoe.optimizer.OptimizerStatistics;
import org.djlmoe.tier.MappedFileTier;

/**
 * Steps of AdamW on random weights with the gradients that PyTorch keeps with them. DJL's optimizer
 * and ours set them to zero afterwards, and so does {@code fused-zero}; the bare kernel, {@code
 * fused}, does not.
 */
public final class OptimizerWorkload implements Workload {

    /** DJL's AdamW, with an allocator that keeps what is freed. */
    public static final String DJL = "djl-adamw";

    /** The state in memory, updated in place. */
    public static final String MEMORY = "memory-tier";

    static final String DJL_DEFAULT = "djl-adamw-default";
    static final String FUSED = "fused";
    static final String FUSED_ZERO = "fused-zero";
    static final String MEMORY_BESIDE_FILE = "memory-beside-file";
    static final String STAGED = "staged";
    static final String FILE = "file-tier";
    static final String FILE_COLD = "file-tier-cold";
    static final String RAW = "raw-file";

    private static final float RATE = 1e-3f;
    private static final int SAMPLE = 1 << 20;

    /** The kernel alone, on all arrays at once. */
    private static final String KERNEL =
            """
            def step(self, w: List[Tensor], g: List[Tensor], m: List[Tensor], v: List[Tensor], t: int, lr: float, zero: bool) -> int:
                steps = annotate(List[Tensor], [])
                for i in range(len(w)):
                    steps.append(torch.tensor(float(t), dtype=6))
                none = annotate(List[Tensor], [])
                torch._fused_adamw_(w, g, m, v, none, steps, lr=lr, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False)
                if zero:
                    for i in range(len(g)):
                        g[i].zero_()
                return 0
            """;

    private final NDManager manager;
    private final List<Slot> slots = new ArrayList<>();
    private final NDArray before;
    private final Map<String, NDArray> first = new LinkedHashMap<>();
    private final MappedFileTier files;
    private final boolean cold;
    private Runnable step;
    private OffloadStreamAdamW ours;
    private boolean dropped;

    /**
     * Creates the workload.
     *
     * @param settings parameters, array, bucket, seed, and the directory {@code tier}
     */
    public OptimizerWorkload(CaseSettings settings) {
        manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
        manager.getEngine().setRandomSeed(settings.number("seed"));
        try (GradientCollector collector = manager.getEngine().newGradientCollector()) {
            int array = settings.number("array");
            for (int left = settings.number("parameters"); left > 0; left -= array) {
                addParameter(Math.min(left, array), collector);
            }
        }
        before = sample();
        String name = settings.name();
        cold = name.equals(FILE_COLD);
        boolean inFiles = cold || name.equals(FILE);
        files = inFiles ? new MappedFileTier(Path.of(settings.options().get("tier"))) : null;
        if (name.equals(FUSED) || name.equals(FUSED_ZERO)) {
            step = fused(name.equals(FUSED_ZERO));
        } else if (name.equals(DJL) || name.equals(DJL_DEFAULT)) {
            Optimizer djl = AdamW.builder().optLearningRateTracker(Tracker.fixed(RATE)).build();
            step = () -> slots.forEach(s -> djl.update(s.id(), s.weight(), s.gradient()));
        } else {
            OffloadStreamAdamW.Builder builder =
                    OffloadStreamAdamW.builder()
                            .setLearningRateTracker(Tracker.fixed(RATE))
                            .optStaged(name.equals(STAGED));
            if (settings.options().containsKey("bucket")) {
                builder.optBucketElements(settings.number("bucket"));
            }
            if (inFiles) {
                builder.optTier(files);
            }
            ours = builder.build();
            step = () -> ours.step(slots);
        }
    }

    private void addParameter(int size, GradientCollector collector) {
        // Of rank 2: ours does not decay vectors unless told to.
        Shape shape = new Shape(1, size);
        NDArray weight = manager.randomNormal(0, 0.02f, shape, DataType.FLOAT32);
        weight.setRequiresGradient(true);
        try (NDManager scratch = manager.newSubManager()) {
            NDArray gradient = scratch.randomNormal(0, 1e-2f, shape, DataType.FLOAT32);
            NDArray product = gradient.mul(weight).sum();
            product.attach(scratch);
            collector.backward(product);
        }
        String id = String.valueOf(slots.size());
        slots.add(new Slot(id, id, weight, Gradients.of(weight)));
    }

    private Runnable fused(boolean zero) {
        TorchKernels kernels = TorchKernels.compile("bare", KERNEL);
        List<NDArray> w = new ArrayList<>();
        List<NDArray> g = new ArrayList<>();
        List<NDArray> m = new ArrayList<>();
        List<NDArray> v = new ArrayList<>();
        for (Slot slot : slots) {
            w.add(slot.weight());
            g.add(slot.gradient());
            m.add(manager.full(slot.weight().getShape(), 0f, DataType.FLOAT32));
            v.add(manager.full(slot.weight().getShape(), 0f, DataType.FLOAT32));
        }
        int[] count = {0};
        return () -> kernels.run("step", w, g, m, v, ++count[0], (double) RATE, zero);
    }

    /** Some elements of the first weight. */
    private NDArray sample() {
        try (GradMode off = GradMode.off()) {
            NDArray flat = slots.get(0).weight().stopGradient().reshape(-1);
            return flat.get("0:" + Math.min(SAMPLE, flat.size())).duplicate();
        }
    }

    @Override
    public void prepare() {
        if (cold) {
            dropped = files.drop();
        }
    }

    @Override
    public void run() {
        try (GradMode off = GradMode.off()) {
            step.run();
            if (cold) {
                files.flush();
            }
            if (first.isEmpty()) {
                NDArray change = sample().sub(before);
                first.put("loss", change.abs().mean());
                first.put("change", change);
            }
        }
    }

    @Override
    public Map<String, Double> figures() {
        Map<String, Double> figures = new LinkedHashMap<>();
        if (ours != null) {
            OptimizerStatistics last = ours.lastStep();
            figures.put("fetch_ms", 1000 * last.fetchSeconds());
            figures.put("update_ms", 1000 * last.updateSeconds());
            figures.put("write_back_ms", 1000 * last.writeBackSeconds());
            figures.put("stall_ms", 1000 * last.stallSeconds());
            figures.put("staging_mb", last.stagingBytes() / (double) (1 << 20));
        }
        if (cold) {
            // with madvise(MADV_PAGEOUT)
            figures.put("dropped", dropped ? 1.0 : 0.0);
        }
        return figures;
    }

    @Override
    public Map<String, NDArray> results() {
        return new LinkedHashMap<>(first);
    }

    @Override
    public void close() {
        if (ours != null) {
            ours.close();
        }
        if (files != null) {
            files.close();
        }
        manager.close();
    }
}
