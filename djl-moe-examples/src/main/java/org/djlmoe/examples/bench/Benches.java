package org.djlmoe.examples.bench;

import java.util.List;

/** The cases of each benchmark. */
public final class Benches {

    private Benches() {}

    /**
     * Returns the cases of the vocabulary projection, all compared with double precision.
     *
     * @return the cases
     */
    public static List<Case> vocab() {
        Case mean = new Case("reference", VocabReference.class, null);
        Case none = new Case("reference-none", VocabReference.class, null);
        Case all = new Case("reference-all-options", VocabReference.class, null);
        return List.of(
                new Case(VocabWorkload.OURS, VocabWorkload.class, mean),
                new Case(VocabWorkload.STOCK, VocabWorkload.class, mean),
                new Case(VocabWorkload.OURS_NONE, VocabWorkload.class, none),
                new Case(VocabWorkload.OURS_ALL_OPTIONS, VocabWorkload.class, all));
    }

    /**
     * Returns the cases of checkpointed decoder layers, compared with plain autograd: boundaries in
     * memory, in files, and in files on a disk that takes 0.8 of a segment's time for each.
     *
     * @return the cases
     */
    public static List<Case> checkpoint() {
        Case stock = new Case(CheckpointWorkload.STOCK, CheckpointWorkload.class, null);
        return List.of(
                stock,
                new Case(CheckpointWorkload.MEMORY, CheckpointWorkload.class, stock),
                new Case(CheckpointWorkload.FILE_TIER, CheckpointWorkload.class, stock),
                new Case(CheckpointWorkload.SLOW_TIER, CheckpointWorkload.class, stock));
    }

    /**
     * Returns the cases of a Mixture-of-Experts layer on one rank, compared with DJL's own
     * automatic differentiation: in one chunk, and in as many as {@code chunks} says.
     *
     * @return the cases
     */
    public static List<Case> dispatch() {
        Case stock = new Case(MoeLayerWorkload.STOCK, StockMoeLayerWorkload.class, null);
        return List.of(
                stock,
                new Case(MoeLayerWorkload.withChunks(1), MoeLayerWorkload.class, stock),
                new Case(MoeLayerWorkload.PIPELINED, MoeLayerWorkload.class, stock));
    }

    /**
     * Returns a case of a Mixture-of-Experts layer in a given number of chunks, for its peak alone.
     *
     * @param chunks K
     * @return the case
     */
    public static Case dispatch(int chunks) {
        return new Case(MoeLayerWorkload.withChunks(chunks), MoeLayerWorkload.class, null);
    }

    /**
     * Returns the cases of an AdamW step: DJL's with either allocator, PyTorch's fused kernel alone
     * and with gradients set to zero, ours with its state in memory, staged and in files, warm and
     * cold, and the time that a disk takes to read and write the bytes of the state.
     *
     * @return the cases
     */
    public static List<Case> optimizer() {
        Class<OptimizerWorkload> step = OptimizerWorkload.class;
        Case fused = new Case(OptimizerWorkload.FUSED, step, null);
        return List.of(
                new Case(OptimizerWorkload.DJL, step, null),
                new Case(OptimizerWorkload.DJL_DEFAULT, step, null, true, 0),
                fused,
                new Case(OptimizerWorkload.FUSED_ZERO, step, fused),
                new Case(OptimizerWorkload.MEMORY, step, fused),
                // Apart: the longer a file's pages wait for their turn, the sooner Linux writes or
                // drops them.
                new Case(OptimizerWorkload.MEMORY_BESIDE_FILE, step, fused, false, 1),
                new Case(OptimizerWorkload.FILE, step, fused, false, 1),
                // What these force to the disk takes other files along on a journaling file system.
                new Case(OptimizerWorkload.STAGED, step, fused, false, 2),
                new Case(OptimizerWorkload.FILE_COLD, step, fused, false, 2),
                new Case(OptimizerWorkload.RAW, RawFileWorkload.class, null, false, 2));
    }

    /**
     * Returns which of the optimizer's times are compared beside ours with DJL's.
     *
     * @return pairs {@code CASE/CASE}
     */
    public static List<String> optimizerPairs() {
        return List.of(
                OptimizerWorkload.MEMORY + "/" + OptimizerWorkload.DJL_DEFAULT,
                OptimizerWorkload.MEMORY + "/" + OptimizerWorkload.FUSED,
                OptimizerWorkload.MEMORY + "/" + OptimizerWorkload.FUSED_ZERO,
                OptimizerWorkload.FILE + "/" + OptimizerWorkload.MEMORY_BESIDE_FILE,
                OptimizerWorkload.FILE_COLD + "/" + OptimizerWorkload.RAW);
    }

    /**
     * Returns the cases of the drop-in example, compared with the program as it was.
     *
     * @return the cases
     */
    public static List<Case> dropIn() {
        Case stock = new Case(DropInWorkload.STOCK, DropInWorkload.class, null);
        return List.of(stock, new Case(DropInWorkload.OURS, DropInWorkload.class, stock));
    }
}
