package org.djlmoe.optimizer;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.djlmoe.optimizer.BucketLayout.Slab;
import org.djlmoe.optimizer.StateBuckets.Bucket;
import org.djlmoe.optimizer.StateBuckets.Place;

/**
 * The state of an optimizer by parameter path, to be saved and loaded: how often a parameter has
 * been updated, and the running means of its gradient ({@code exp_avg}) and of its square ({@code
 * exp_avg_sq}), both of the parameter's shape, 32-bit floats.
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
        return entry(path).shape();
    }

    /**
     * Returns how often a parameter has been updated.
     *
     * @param path the parameter
     * @return the number of updates; 0 for a parameter without elements
     * @throws IllegalArgumentException if the parameter has no state
     */
    public long step(String path) {
        List<Place> places = entry(path).places();
        return places.isEmpty()
                ? 0
                : buckets.bucket(places.get(0).bucket()).steps[places.get(0).index()];
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
        NDArray copy = manager.zeros(shape(path), DataType.FLOAT32);
        transfer(path, 0, copy, true, true);
        return copy;
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
        NDArray copy = manager.zeros(shape(path), DataType.FLOAT32);
        transfer(path, 0, copy, false, true);
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
        transfer(path, start, expAvg, true, true);
        transfer(path, start, expAvgSq, false, true);
    }

    /**
     * Makes room for a parameter and sets how often it has been updated. The running means are left
     * as they are, zero at first.
     *
     * @param path the parameter
     * @param shape its shape
     * @param step the number of updates
     * @throws IllegalStateException if there is state of another shape for the parameter
     */
    public void define(String path, Shape shape, long step) {
        if (step < 0) {
            throw new IllegalArgumentException(path + ": the step count " + step + " is negative");
        }
        buckets.ensure(Map.of(path, shape));
        for (Place place : entry(path).places()) {
            buckets.bucket(place.bucket()).steps[place.index()] = step;
        }
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
        transfer(path, start, expAvg, true, false);
        transfer(path, start, expAvgSq, false, false);
    }

    private void transfer(String path, long start, NDArray array, boolean mean, boolean out) {
        StateBuckets.Entry entry = entry(path);
        long end = start + array.size();
        if (array.getDataType() != DataType.FLOAT32) {
            throw new IllegalArgumentException(
                    path + ": the state is FLOAT32, not " + array.getDataType());
        }
        if (start < 0 || end > entry.shape().size()) {
            throw new IllegalArgumentException(
                    String.format(
                            "%s has %d elements, so [%d, %d) is no part of it",
                            path, entry.shape().size(), start, end));
        }
        for (Place place : entry.places()) {
            Bucket bucket = buckets.bucket(place.bucket());
            Slab slab = bucket.slabs.get(place.index());
            long from = Math.max(start, slab.start());
            long length = Math.min(end, slab.start() + slab.length()) - from;
            if (length > 0) {
                NDArray state = mean ? bucket.expAvg : bucket.expAvgSq;
                long inBucket = slab.offset() + from - slab.start();
                if (out) {
                    kernels.copy(array, from - start, state, inBucket, length);
                } else {
                    kernels.copy(state, inBucket, array, from - start, length);
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
