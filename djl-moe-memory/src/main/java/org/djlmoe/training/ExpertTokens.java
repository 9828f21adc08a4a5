package org.djlmoe.training;

import ai.djl.nn.Parameter;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.IdentityHashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.model.MoeDecoder;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.routing.Router;
import org.djlmoe.routing.RoutingObserver;

/**
 * Counts the tokens of each expert of a decoder, for an optimizer that treats experts without any
 * by themselves: {@code optIdleExperts(IdleExperts.SKIP, tokens::take)}.
 *
 * <p>Everything that passes through the decoder's routers counts, forward passes of an evaluation
 * of one's own included: an expert that only they used is then no idle one. {@link Evaluation} does
 * not count.
 */
public final class ExpertTokens implements AutoCloseable {

    private final MoeDecoder decoder;
    private final List<long[]> counts = new ArrayList<>();
    private final List<RoutingObserver> before = new ArrayList<>();

    private ExpertTokens(MoeDecoder decoder) {
        this.decoder = decoder;
    }

    /**
     * Begins to count. Observers that routers have already go on seeing the choices.
     *
     * @param decoder the decoder
     * @return the counts; close them to count no more
     */
    public static ExpertTokens observe(MoeDecoder decoder) {
        ExpertTokens tokens = new ExpertTokens(decoder);
        for (MoeBlock layer : decoder.moeBlocks()) {
            tokens.observe(layer.router());
        }
        return tokens;
    }

    private void observe(Router router) {
        long[] ofLayer = new long[router.experts()];
        RoutingObserver other = router.observer();
        counts.add(ofLayer);
        before.add(other);
        router.setObserver(
                ids -> {
                    for (long id : ids.toLongArray()) {
                        ofLayer[(int) id]++;
                    }
                    if (other != null) {
                        other.chosen(ids);
                    }
                });
    }

    /**
     * Returns the routes of each expert since the last call, and begins again.
     *
     * @return for each parameter of the experts and of their adapters, by path, one number an
     *     expert
     */
    public Map<String, long[]> take() {
        Map<Parameter, String> paths = new IdentityHashMap<>();
        decoder.namedParameters().forEach((path, parameter) -> paths.put(parameter, path));
        Map<String, long[]> taken = new LinkedHashMap<>();
        List<MoeBlock> layers = decoder.moeBlocks();
        for (int l = 0; l < layers.size(); l++) {
            long[] ofLayer = counts.get(l).clone();
            Arrays.fill(counts.get(l), 0);
            for (Parameter parameter : layers.get(l).experts().getParameters().values()) {
                taken.put(paths.get(parameter), ofLayer);
            }
        }
        return taken;
    }

    /** Gives the routers back the observers that they had. */
    @Override
    public void close() {
        List<MoeBlock> layers = decoder.moeBlocks();
        for (int l = 0; l < layers.size(); l++) {
            layers.get(l).router().setObserver(before.get(l));
        }
    }
}
