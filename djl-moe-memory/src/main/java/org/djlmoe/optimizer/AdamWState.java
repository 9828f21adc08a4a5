package org.djlmoe.optimizer;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.djlmoe.optimizer.BucketLayout.Slab;
import org.djlmoe.optimizer.BucketState.Part;
import org.djlmoe.optimizer.StateBuckets.Need;
import org.djlmoe.optimizer.StateBuckets.Place;

/**
 * The state of an optimizer by parameter path, to be saved and loaded: how often a parameter, or
 * each expert of a stacked one, has been updated, the running means of its gradient ({@code
 * exp_avg}) and of its square ({@code exp_avg_sq}) and, for weights of half precision, the 32-bit
 * master weight; all of the parameter's shape, 32-bit floats.
 *
 * <p>Parameters are read and written in runs of elements of any length, so that no more than one
 * run need be in memory besides the state itself. A view of the optimizer, not a copy: use it
 * between steps.
 */
public final class AdamWState {

    private final StateBuckets buckets;
    private final AdamWKernels kernels;

    AdamWState(StateBuckets buckets, AdamWKernels kernels) {
        this.buckets = buckets;
        this.kernels = kernels;
    }

    /**
     * Returns the parameters that have state.
     *
     * @return their paths, in the order in which they came
     */
    public Set<String> paths() {
        return Collections.unmodifiableSet(buckets.entries().keySet());
    }

    /**
     * Returns the shape of a parameter.
     *
     * @param path the parameter
     * @return its shape
     * @throws IllegalArgumentException if the parameter has no state
     */
    public Shape shape(String path) {
        return entry(path).shape;
    }

    /**
     * Returns whether there is a master weight: the weight itself is of half precision.
     *
     * @param path the parameter
     * @return true if {@link #readMaster} has something to read
     * @throws IllegalArgumentException if the parameter has no state
     */
    public boolean hasMaster(String path) {
        return entry(path).master;
    }

    /**
     * Returns how often a parameter has been updated; of a stacked one, its most often updated
     * expert.
     *
     * @param path the parameter
     * @return the number of updates
     * @throws IllegalArgumentException if the parameter has no state
     */
    public long step(String path) {
        return Arrays.stream(entry(path).steps()).max().orElse(0);
    }

    /**
     * Returns how often a parameter has been updated, expert by expert if they are counted by
     * themselves.
     *
     * @param path the parameter
     * @return one number, or one an expert, the first axis of the parameter
     * @throws IllegalArgumentException if the parameter has no state
     */
    public long[] steps(String path) {
        return entry(path).steps().clone();
    }

    /**
     * Returns a copy of the running mean of a parameter's gradient.
     *
     * @param manager the owner of the copy
     * @param path the parameter
     * @return an array of the parameter's shape
     * @throws IllegalArgumentException if the parameter has no state
     */
    public NDArray expAvg(NDManager manager, String path) {
        return copy(manager, path, Part.EXP_AVG);
    }

    /**
     * Returns a copy of the running mean of the square of a parameter's gradient.
     *
     * @param manager the owner of the copy
     * @param path the parameter
     * @return an array of the parameter's shape
     * @throws IllegalArgumentException if the parameter has no state
     */
    public NDArray expAvgSq(NDManager manager, String path) {
        return copy(manager, path, Part.EXP_AVG_SQ);
    }

    private NDArray copy(NDManager manager, String path, Part part) {
        NDArray copy = manager.zeros(shape(path), DataType.FLOAT32);
        transfer(path, 0, copy, part, true);
        return copy;
    }

    /**
     * Reads a run of elements.
     *
     * @param path the parameter
     * @param start the first element, counted in the flattened parameter
     * @param expAvg filled with as many elements as it has
     * @param expAvgSq likewise
     * @throws IllegalArgumentException if the parameter has no state or fewer elements
     */
    public void read(String path, long start, NDArray expAvg, NDArray expAvgSq) {
        transfer(path, start, expAvg, Part.EXP_AVG, true);
        transfer(path, start, expAvgSq, Part.EXP_AVG_SQ, true);
    }

    /**
     * Reads a run of elements of the master weight.
     *
     * @param path a parameter that {@link #hasMaster has a master}
     * @param start the first element, counted in the flattened parameter
     * @param master filled with as many elements as it has
     * @throws IllegalArgumentException if the parameter has no master or fewer elements
     */
    public void readMaster(String path, long start, NDArray master) {
        transfer(path, start, master, Part.MASTER, true);
    }

    /**
     * Makes room for a parameter with a 32-bit weight and sets how often it has been updated. The
     * running means are left as they are, zero at first.
     *
     * @param path the parameter
     * @param shape its shape
     * @param step the number of updates
     * @throws IllegalStateException if there is state of another shape, or with a master, for the
     *     parameter
     */
    public void define(String path, Shape shape, long step) {
        define(path, shape, new long[] {step}, false);
    }

    /**
     * Makes room for a parameter and sets how often it has been updated. What it holds is left as
     * it is, zero at first; a master that is not written as a whole is taken from the weight.
     *
     * @param path the parameter
     * @param shape its shape
     * @param steps the number of updates, or one for each expert, the first axis of the shape
     * @param master whether the weight is of half precision and has a master
     * @throws IllegalArgumentException if a number is negative, or their count is neither 1 nor the
     *     first axis
     * @throws IllegalStateException if there is state of another shape for the parameter, or with a
     *     master where none is asked for, or the other way round
     */
    public void define(String path, Shape shape, long[] steps, boolean master) {
        if (steps.length != 1 && (shape.dimension() == 0 || steps.length != shape.get(0))) {
            throw new IllegalArgumentException(
                    path
                            + ": "
                            + steps.length
                            + " step counts for the shape "
                            + shape
                            + "; there is one, or one an expert");
        }
        for (long step : steps) {
            if (step < 0) {
                throw new IllegalArgumentException(
                        path + ": the step count " + step + " is negative");
            }
        }
        buckets.ensure(Map.of(path, new Need(shape, master)));
        entry(path).setSteps(steps);
    }

    /**
     * Writes a run of elements.
     *
     * @param path a parameter that has state or was made known with {@link #define}
     * @param start the first element, counted in the flattened parameter
     * @param expAvg the elements
     * @param expAvgSq likewise
     * @throws IllegalArgumentException if the parameter has no state or fewer elements
     */
    public void write(String path, long start, NDArray expAvg, NDArray expAvgSq) {
        transfer(path, start, expAvg, Part.EXP_AVG, false);
        transfer(path, start, expAvgSq, Part.EXP_AVG_SQ, false);
    }

    /**
     * Writes a run of elements of the master weight. The weight follows with its next update, once
     * all elements are written.
     *
     * @param path a parameter that {@link #hasMaster has a master}
     * @param start the first element, counted in the flattened parameter
     * @param master the elements
     * @throws IllegalArgumentException if the parameter has no master or fewer elements
     */
    public void writeMaster(String path, long start, NDArray master) {
        transfer(path, start, master, Part.MASTER, false);
    }

    /** Returns whether a master can be used: all of its elements were written. */
    boolean hasWholeMaster(String path) {
        return entry(path).hasWholeMaster();
    }

    /** Sets a master to its weight, which is of half precision. */
    void fillMaster(String path, NDArray weight) {
        move(entry(path), 0, weight.size(), weight, Part.MASTER, false);
    }

    /** Makes room for groups of parameters, each in buckets of its own: for all or for none. */
    void reserve(List<Map<String, Need>> groups) {
        buckets.ensure(groups);
    }

    private void transfer(String path, long start, NDArray array, Part part, boolean out) {
        transfer(path, start, array.size(), array, part, out);
    }

    /** Moves the first {@code length} elements of an array. */
    void transfer(String path, long start, long length, NDArray array, Part part, boolean out) {
        StateBuckets.Entry entry = entry(path);
        if (array.getDataType() != DataType.FLOAT32) {
            throw new IllegalArgumentException(
                    path + ": the state is FLOAT32, not " + array.getDataType());
        }
        if (part == Part.MASTER && !entry.master) {
            throw new IllegalArgumentException(path + " has no master weight");
        }
        if (start < 0 || start + length > entry.shape.size()) {
            throw new IllegalArgumentException(
                    String.format(
                            "%s has %d elements, so [%d, %d) is no part of it",
                            path, entry.shape.size(), start, start + length));
        }
        move(entry, start, length, array, part, out);
    }

    private void move(
            StateBuckets.Entry entry,
            long start,
            long length,
            NDArray array,
            Part part,
            boolean out) {
        if (part == Part.MASTER && !out) {
            entry.masterWritten += length;
        }
        for (Place place : entry.places) {
            Slab slab = place.slab();
            BucketState state = place.bucket().state;
            long from = Math.max(start, slab.start());
            long run = Math.min(start + length, slab.start() + slab.length()) - from;
            if (run > 0) {
                long inBucket = state.first(part) + slab.offset() + from - slab.start();
                if (out) {
                    kernels.copy(array, from - start, state.array(), inBucket, run);
                } else {
                    kernels.copy(state.array(), inBucket, array, from - start, run);
                }
            }
        }
    }

    private StateBuckets.Entry entry(String path) {
        StateBuckets.Entry entry = buckets.entries().get(path);
        if (entry == null) {
            throw new IllegalArgumentException("There is no optimizer state for " + path);
        }
        return entry;
    }
}
