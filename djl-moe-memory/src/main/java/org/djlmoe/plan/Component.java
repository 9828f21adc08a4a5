package org.djlmoe.plan;

import java.util.Collections;
import java.util.EnumMap;
import java.util.Map;

/**
 * One line of a plan: arrays of one purpose.
 *
 * @param name what they are for
 * @param formula how the size comes about, in words
 * @param unbounded bytes that plain automatic differentiation of the same operations would hold for
 *     the same purpose when the loss has been computed
 * @param byPhase bytes in each phase in which they are alive; immutable
 */
public record Component(String name, String formula, long unbounded, Map<Phase, Long> byPhase) {

    /** Copies the map. */
    public Component {
        EnumMap<Phase, Long> copy = new EnumMap<>(Phase.class);
        byPhase.forEach(
                (phase, bytes) -> {
                    if (bytes > 0) {
                        copy.put(phase, bytes);
                    }
                });
        byPhase = Collections.unmodifiableMap(copy);
    }

    /**
     * Returns the most that it needs in any phase.
     *
     * @return bytes
     */
    public long bytes() {
        return byPhase.values().stream().mapToLong(Long::longValue).max().orElse(0);
    }

    /**
     * Returns what it needs in a phase.
     *
     * @param phase the phase
     * @return bytes, 0 if it is not alive then
     */
    public long bytes(Phase phase) {
        return byPhase.getOrDefault(phase, 0L);
    }
}
