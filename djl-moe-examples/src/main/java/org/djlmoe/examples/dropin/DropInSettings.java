package org.djlmoe.examples.dropin;

/**
 * The shape of the program.
 *
 * @param vocab V
 * @param hidden H
 * @param layers encoder blocks
 * @param heads attention heads; divides H
 * @param batch sequences a batch
 * @param sequence S, tokens a sequence
 * @param batches batches an epoch
 * @param epochs epochs
 * @param seed decides weights and tokens
 */
public record DropInSettings(
        int vocab,
        int hidden,
        int layers,
        int heads,
        int batch,
        int sequence,
        int batches,
        int epochs,
        int seed) {

    /** What the two programs run with: small enough for a laptop. */
    public static final DropInSettings DEFAULT =
            new DropInSettings(2000, 64, 2, 4, 8, 64, 20, 3, 42);
}
