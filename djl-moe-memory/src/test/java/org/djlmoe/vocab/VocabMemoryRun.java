package org.djlmoe.vocab;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.util.Locale;
import org.djlmoe.autograd.Gradients;
import org.djlmoe.autograd.Tape;
import org.djlmoe.kernel.ArrayKernels;
import org.djlmoe.plan.PeakMeter;
import org.djlmoe.vocab.RingDtpLoss.Reduction;

/**
 * Prints the working memory of a loss with gradients, in bytes: the peak less the inputs and their
 * gradients. For a mean and for a loss of each token, each at two numbers of tokens. Run with an
 * allocator that returns memory.
 */
final class VocabMemoryRun {

    static final int FEW = 2048;
    static final int MANY = 18432;
    static final int HIDDEN = 512;
    private static final int VOCAB = 500;

    private VocabMemoryRun() {}

    public static void main(String[] arguments) {
        StringBuilder line = new StringBuilder();
        for (Reduction reduction : new Reduction[] {Reduction.MEAN, Reduction.NONE}) {
            for (int tokens : new int[] {FEW, MANY}) {
                line.append(String.format(Locale.ROOT, " %d", working(reduction, tokens)));
            }
        }
        System.out.println(line);
    }

    private static long working(Reduction reduction, int tokens) {
        RingDtpLoss loss = RingDtpLoss.builder().optReduction(reduction).build();
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            NDArray hidden = manager.randomNormal(new Shape(tokens, HIDDEN));
            NDArray weight = manager.randomNormal(new Shape(VOCAB, HIDDEN));
            weight.setRequiresGradient(true);
            NDArray labels = manager.randomInteger(0, VOCAB, new Shape(tokens), DataType.INT64);
            long working = 0;
            // The first step makes the gradient of the weight.
            for (int step = 0; step < 2; step++) {
                System.gc();
                NDArray leaf = hidden.stopGradient();
                leaf.setRequiresGradient(true);
                try (NDManager batch = manager.newSubManager();
                        PeakMeter meter = PeakMeter.start()) {
                    NDList in =
                            new NDList(
                                    ArrayKernels.alias(batch, leaf),
                                    ArrayKernels.alias(batch, weight));
                    try (Tape tape = new Tape(batch, 1, () -> {})) {
                        // A factor that scales the gradients, so in place.
                        tape.backward(loss.evaluate(new NDList(labels), in).sum().mul(3));
                    }
                    working = meter.stop().aboveBase() - 4L * tokens * HIDDEN;
                }
                try (NDArray gradient = Gradients.of(leaf)) {
                    if (!(gradient.abs().sum().getFloat() > 0)) {
                        throw new AssertionError("no gradient");
                    }
                }
                leaf.close();
            }
            return working;
        }
    }
}
