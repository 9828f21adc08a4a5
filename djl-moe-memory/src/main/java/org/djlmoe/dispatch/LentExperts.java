package org.djlmoe.dispatch;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import org.djlmoe.dispatch.DispatchPlan.Migration;
import org.djlmoe.kernel.DispatchKernels;
import org.djlmoe.kernel.ExpertKernels.Weights;
import org.djlmoe.kernel.TorchKernels;
import org.djlmoe.parallel.ProcessGroup;
import org.djlmoe.parallel.Transfer;

/**
 * The experts that this rank computes for others during one pass: their weights come once a pass,
 * and the gradients of these go home once, at the end of backward.
 */
final class LentExperts {

    /** The weights of an expert that move. */
    static final List<Weights> MOVED = List.of(Weights.GATE_UP, Weights.DOWN);

    private final ProcessGroup group;
    private final DispatchPlan plan;
    private final PassMemory memory;
    private final NDManager manager;
    private final int[] foreign;
    private final List<Transfer> arrivals = new ArrayList<>();
    private final List<NDArray> weights = absent();
    private final List<NDArray> gradients = absent();
    private long bytesSent;

    LentExperts(ProcessGroup group, DispatchPlan plan, PassMemory memory, List<NDArray> own) {
        this.group = group;
        this.plan = plan;
        this.memory = memory;
        this.manager = memory.manager();
        this.foreign = plan.foreignExperts(group.rank());
        for (Weights w : MOVED) {
            NDArray stack = own.get(w.ordinal());
            if (foreign.length > 0) {
                memory.add(foreign.length * slabBytes(stack));
                weights.set(w.ordinal(), DispatchKernels.newStack(manager, stack, foreign.length));
            }
        }
    }

    private static List<NDArray> absent() {
        return new ArrayList<>(
                Collections.nCopies(Weights.values().length, TorchKernels.nothing()));
    }

    private static long slabBytes(NDArray stack) {
        // Half precision is a type that DJL does not know.
        long value = stack.getDataType() == DataType.FLOAT32 ? 4 : 2;
        return stack.getShape().get(1) * stack.getShape().get(2) * value;
    }

    /** Starts to send the weights that others need and to receive those that this rank needs. */
    void fetch(List<NDArray> own) {
        for (Migration m : plan.migrations()) {
            for (Weights w : MOVED) {
                if (m.home() == group.rank()) {
                    NDArray stack = own.get(w.ordinal());
                    NDArray slab = DispatchKernels.slab(manager, stack, ownIndex(m.expert()));
                    arrivals.add(group.startSend(slab, m.helper()));
                    bytesSent += slabBytes(stack);
                } else if (m.helper() == group.rank()) {
                    arrivals.add(
                            group.startReceive(
                                    DispatchKernels.slab(
                                            manager,
                                            weights.get(w.ordinal()),
                                            lentIndex(m.expert())),
                                    m.home()));
                }
            }
        }
    }

    void await() {
        while (!arrivals.isEmpty()) {
            arrivals.get(0).await();
            arrivals.remove(0);
        }
    }

    /** Whatever came of it, nothing touches the arrays any more. */
    List<Transfer> open() {
        return arrivals;
    }

    /** Makes gradients, zero, for what the group trains. */
    void trainLike(List<NDArray> ownGradients) {
        for (Weights w : MOVED) {
            if (foreign.length > 0 && ownGradients.get(w.ordinal()).size() > 0) {
                NDArray stack = ownGradients.get(w.ordinal());
                memory.add(foreign.length * slabBytes(stack));
                NDArray zeros = DispatchKernels.newStack(manager, stack, foreign.length);
                DispatchKernels.zero(zeros);
                gradients.set(w.ordinal(), zeros);
            }
        }
    }

    /** Adds what helpers found to the gradients of this rank's experts, in the plan's order. */
    void sendGradientsHome(List<NDArray> ownGradients) {
        for (Migration m : plan.migrations()) {
            for (Weights w : MOVED) {
                if (m.helper() == group.rank() && gradients.get(w.ordinal()).size() > 0) {
                    NDArray stack = gradients.get(w.ordinal());
                    NDArray slab = DispatchKernels.slab(manager, stack, lentIndex(m.expert()));
                    arrivals.add(group.startSend(slab, m.home()));
                    bytesSent += slabBytes(stack);
                }
            }
        }
        for (Weights w : MOVED) {
            NDArray stack = ownGradients.get(w.ordinal());
            boolean lends = plan.migrations().stream().anyMatch(m -> m.home() == group.rank());
            if (lends && stack.size() > 0) {
                memory.add(slabBytes(stack));
            }
        }
        addGradients(ownGradients);
        await();
    }

    private void addGradients(List<NDArray> ownGradients) {
        NDArray[] parts = new NDArray[Weights.values().length];
        for (Migration m : plan.migrations()) {
            for (Weights w : MOVED) {
                NDArray stack = ownGradients.get(w.ordinal());
                if (m.home() == group.rank() && stack.size() > 0) {
                    if (parts[w.ordinal()] == null) {
                        NDArray one = DispatchKernels.newStack(manager, stack, 1);
                        parts[w.ordinal()] = DispatchKernels.slab(manager, one, 0);
                    }
                    Transfer arrival = group.startReceive(parts[w.ordinal()], m.helper());
                    arrivals.add(arrival);
                    arrival.await();
                    arrivals.remove(arrival);
                    DispatchKernels.addToSlab(stack, ownIndex(m.expert()), parts[w.ordinal()]);
                }
            }
        }
    }

    private int firstOwn() {
        return DispatchPlan.firstExpert(group.rank(), group.size(), plan.numExperts());
    }

    private int ownIndex(int expert) {
        return expert - firstOwn();
    }

    private int lentIndex(int expert) {
        return Arrays.binarySearch(foreign, expert);
    }

    /** The slot of every expert, and last that of none. */
    long[] slots(int own) {
        long[] table = new long[plan.numExperts() + 1];
        Arrays.fill(table, own + foreign.length);
        for (int i = 0; i < own; i++) {
            table[firstOwn() + i] = i;
        }
        for (int i = 0; i < foreign.length; i++) {
            table[foreign[i]] = own + i;
        }
        return table;
    }

    int count() {
        return foreign.length;
    }

    List<NDArray> weights() {
        return weights;
    }

    List<NDArray> gradients() {
        return gradients;
    }

    long bytesSent() {
        return bytesSent;
    }
}
