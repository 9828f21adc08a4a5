package org.djlmoe.serving;

import ai.djl.ndarray.NDArray;
import org.djlmoe.model.MoeConfig;

/**
 * The experts of a model that is being served: all in fast memory, or some.
 *
 * <p>An {@link IncrementalDecoder} drives it from one thread, layer by layer.
 */
public abstract sealed class ServedExperts implements AutoCloseable
        permits ResidentExperts, OffloadedExperts {

    private boolean decoding;
    private ExpertTraffic prompt = ExpertTraffic.NONE;
    private ExpertTraffic decode = ExpertTraffic.NONE;

    ServedExperts() {}

    /** Says whether what is counted from now on is that of generated tokens, or of a prompt. */
    final void countAs(boolean generated) {
        decoding = generated;
    }

    final void count(ExpertTraffic more) {
        if (decoding) {
            decode = decode.plus(more);
        } else {
            prompt = prompt.plus(more);
        }
    }

    /** Fails unless these are the experts of a model. */
    abstract void requireFor(MoeConfig config);

    /**
     * Hears what N tokens of a layer ask for and starts what has to be loaded.
     *
     * @param layer the MoE layer
     * @param ids the tokens' ids, [N k], token by token
     * @param decoding whether the tokens count as generated ones and not as prompt
     */
    abstract void begin(int layer, long[] ids, boolean decoding);

    /** Whether {@link #prefetch} wants to hear which experts the next layer's router expects. */
    abstract boolean wantsForecast();

    /** Hears what one token will probably ask of a layer, k ids. */
    abstract void prefetch(int layer, long[] ids);

    /**
     * Computes what {@link #begin} was told.
     *
     * @param h normed rows [N, H]
     * @param out [N k, H], filled with each choice's output
     */
    abstract void compute(NDArray h, NDArray out);

    /**
     * Returns what generated tokens have asked for so far.
     *
     * @return the traffic while decoding
     */
    public final ExpertTraffic decodeTraffic() {
        return decode;
    }

    /**
     * Returns what prompts have asked for so far.
     *
     * @return the traffic while reading prompts
     */
    public final ExpertTraffic promptTraffic() {
        return prompt;
    }

    /**
     * Returns the fast memory that experts take.
     *
     * @return bytes of all slots
     */
    public abstract long residentBytes();

    /**
     * Says where the experts are.
     *
     * @return a phrase for a report
     */
    public abstract String describe();

    /** Frees the slots. Stores given to it stay open. */
    @Override
    public abstract void close();
}
