package org.djlmoe.optimizer;

import java.util.Map;

/**
 * Which experts had tokens. It cannot be read off the gradients: an expert without tokens has a
 * gradient of zeros, and so may one with tokens.
 */
@FunctionalInterface
public interface ExpertLoad {

    /**
     * Returns how many routes each expert has had since the last call. Called once a step, before
     * its first update.
     *
     * @return for each stacked parameter [E, ...] by path, E numbers; parameters that are not in it
     *     have no experts
     */
    Map<String, long[]> take();
}
