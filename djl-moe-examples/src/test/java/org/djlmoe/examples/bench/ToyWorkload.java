package org.djlmoe.examples.bench;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.util.LinkedHashMap;
import java.util.Map;

/** Holds so many megabytes for a moment; fails, or is a little off, if its name says so. */
public final class ToyWorkload implements Workload {

    private static final int MB_FLOATS = 1 << 18;

    private final NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
    private final CaseSettings settings;
    private final NDArray resident = manager.ones(new Shape(100L * MB_FLOATS));
    private int runs;

    public ToyWorkload(CaseSettings settings) {
        this.settings = settings;
        if (settings.name().equals("broken-start")) {
            throw new IllegalStateException("no start today");
        }
    }

    @Override
    public void run() {
        runs++;
        System.out.println("what a library says");
        if (settings.name().equals("broken-run") && runs == settings.number("broken")) {
            throw new IllegalStateException("the wheel came off");
        }
        if (settings.name().equals("killed-run")) {
            Runtime.getRuntime().halt(7);
        }
        long megabytes = settings.number(settings.name().equals("stock") ? "stock_mb" : "ours_mb");
        try (NDManager scratch = manager.newSubManager()) {
            scratch.ones(new Shape(megabytes * MB_FLOATS));
        }
    }

    @Override
    public Map<String, NDArray> results() {
        boolean exact = settings.name().equals("reference");
        Map<String, NDArray> results = new LinkedHashMap<>();
        results.put("loss", manager.create(exact ? 2f : 2.002f));
        NDArray gradient = manager.create(new double[] {3, 4});
        results.put("small", exact ? gradient : manager.create(new float[] {3, 4}));
        results.put("large", manager.full(new Shape(70_000), exact ? 1f : 1.01f));
        results.put("bool", manager.zeros(new Shape(2), DataType.FLOAT32));
        return results;
    }

    @Override
    public Map<String, Double> figures() {
        return Map.of("run_count", (double) runs);
    }

    @Override
    public void close() {
        resident.close();
        manager.close();
    }
}
