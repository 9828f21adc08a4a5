package org.djlmoe.serving;

import java.util.Arrays;
import java.util.Locale;

/**
 * What is loaded ahead for the next layer while a layer computes a single sequence's next token.
 * Prompts and batches share their loads and prefetch nothing.
 */
public enum Prefetch {
    /** Nothing. */
    OFF,
    /**
     * What the next layer's router chooses for the hidden state that this layer begins with: the
     * residual stream changes little from layer to layer. Not for the first layer.
     */
    ROUTER,
    /** What the next layer has used most so far. Not for the first layer. */
    FREQUENCY;

    /**
     * Finds a way by its name in options.
     *
     * @param name as {@link #toString()}
     * @return the way
     * @throws IllegalArgumentException if there is none, naming those there are
     */
    public static Prefetch of(String name) {
        return Arrays.stream(values())
                .filter(p -> p.toString().equalsIgnoreCase(name))
                .findFirst()
                .orElseThrow(
                        () ->
                                new IllegalArgumentException(
                                        "No way to prefetch '%s': choose one of %s"
                                                .formatted(name, Arrays.toString(values()))));
    }

    @Override
    public String toString() {
        return name().toLowerCase(Locale.ROOT);
    }
}
