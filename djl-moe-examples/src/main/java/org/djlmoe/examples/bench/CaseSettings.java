package org.djlmoe.examples.bench;

import java.util.Map;

/**
 * What a case is told.
 *
 * @param name the case
 * @param options its options
 */
public record CaseSettings(String name, Map<String, String> options) {

    /**
     * Returns an option.
     *
     * @param option the option
     * @return its value
     * @throws IllegalArgumentException if it is missing or no whole number
     */
    public int number(String option) {
        String value = options.get(option);
        try {
            return Integer.parseInt(value);
        } catch (NumberFormatException e) {
            throw new IllegalArgumentException(
                    "Case " + name + ": the option " + option + " is " + value, e);
        }
    }
}
