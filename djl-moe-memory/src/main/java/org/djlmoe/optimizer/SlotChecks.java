package org.djlmoe.optimizer;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.types.Shape;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.djlmoe.autograd.StepOptimizer.Slot;
import org.djlmoe.optimizer.AdamWKernels.Precision;

/** Refuses by name, before anything changes, what cannot be updated. */
final class SlotChecks {

    private final AdamWKernels kernels;

    /** DJL's id of the parameter that each path belongs to. */
    private final Map<String, String> ids = new HashMap<>();

    SlotChecks(AdamWKernels kernels) {
        this.kernels = kernels;
    }

    /**
     * Checks what is updated together.
     *
     * @param slots at least one
     * @throws IllegalStateException if a path was another model's before
     * @throws IllegalArgumentException if an array has a type, shape, place or order in memory that
     *     the update has no way for, or a parameter comes twice
     */
    void check(List<Slot> slots) {
        Set<String> paths = new HashSet<>();
        for (Slot slot : slots) {
            if (!paths.add(slot.path())) {
                throw new IllegalArgumentException(slot.path() + " comes twice in one step");
            }
            checkModel(slot);
            checkDevice(slots.get(0), slot);
            checkTypes(slot);
            checkShapes(slot);
        }
        checkOrder(slots);
    }

    /** Remembers whose parameters were updated. */
    void updated(List<Slot> slots) {
        slots.forEach(slot -> ids.put(slot.path(), slot.id()));
    }

    private void checkModel(Slot slot) {
        String id = ids.get(slot.path());
        if (id != null && !id.equals(slot.id())) {
            throw new IllegalStateException(
                    "This optimizer has updated a "
                            + slot.path()
                            + " of another model, or of adapters that have been attached anew since:"
                            + " build a new optimizer, or load a saved state to go on with the new"
                            + " parameter");
        }
    }

    /** Lets parameters of another model take over their paths. */
    void forgetModel() {
        ids.clear();
    }

    private static void checkDevice(Slot first, Slot slot) {
        Device device = first.weight().getDevice();
        if (!slot.weight().getDevice().equals(device)) {
            throw new IllegalArgumentException(
                    String.format(
                            "%s lies on %s and %s on %s, but an optimizer updates on one"
                                    + " device: build one for each",
                            first.path(), device, slot.path(), slot.weight().getDevice()));
        }
        if (!slot.gradient().getDevice().equals(device)) {
            throw new IllegalArgumentException(
                    slot.path()
                            + " lies on "
                            + device
                            + " and its gradient on "
                            + slot.gradient().getDevice());
        }
    }

    private void checkTypes(Slot slot) {
        Precision weight = kernels.precision(slot.weight());
        Precision gradient = kernels.precision(slot.gradient());
        if (weight == Precision.OTHER
                || gradient == Precision.OTHER
                || weight == Precision.F32 && gradient == Precision.HALF) {
            throw new IllegalArgumentException(
                    String.format(
                            "%s is %s with a gradient of %s, but this optimizer updates FLOAT32"
                                    + " with gradients of FLOAT32, and FLOAT16 or BFLOAT16 with"
                                    + " gradients of either: convert it, or freeze the parameter",
                            slot.path(),
                            slot.weight().getDataType(),
                            slot.gradient().getDataType()));
        }
    }

    private static void checkShapes(Slot slot) {
        if (!slot.weight().getShape().equals(slot.gradient().getShape())) {
            throw new IllegalArgumentException(
                    slot.path()
                            + " has the shape "
                            + slot.weight().getShape()
                            + " and a gradient of the shape "
                            + slot.gradient().getShape());
        }
    }

    /** Gradients may lie in any order: they are only read, and set to zero as a whole. */
    private void checkOrder(List<Slot> slots) {
        List<NDArray> weights = slots.stream().map(Slot::weight).toList();
        if (kernels.areContiguous(weights)) {
            return;
        }
        for (Slot slot : slots) {
            if (!kernels.areContiguous(List.of(slot.weight()))) {
                throw new IllegalArgumentException(
                        slot.path()
                                + " is a view whose elements do not lie in memory one after the"
                                + " other, so it cannot be updated in place: give the parameter a"
                                + " copy, weight.reshape(-1).reshape(weight.getShape())");
            }
        }
    }

    /**
     * Checks what is known of a parameter's experts.
     *
     * @param tokens the tokens of each expert, or null if the parameter has none
     * @throws IllegalArgumentException if there are not as many as the first axis has
     */
    static void checkLoad(Slot slot, long[] tokens) {
        Shape shape = slot.weight().getShape();
        if (tokens != null && (shape.dimension() == 0 || shape.get(0) != tokens.length)) {
            throw new IllegalArgumentException(
                    "The expert load of "
                            + slot.path()
                            + " is of "
                            + tokens.length
                            + " experts, but its shape is "
                            + shape);
        }
    }
}
