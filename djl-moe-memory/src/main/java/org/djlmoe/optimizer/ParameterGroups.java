package org.djlmoe.optimizer;

import java.util.ArrayList;
import java.util.List;
import java.util.function.Predicate;

/** Which weight decay and which learning-rate multiplier a parameter has; the first match wins. */
final class ParameterGroups {

    private record Rule(Predicate<String> path, double value) {}

    private final List<Rule> decays = new ArrayList<>();
    private final List<Rule> multipliers = new ArrayList<>();

    void addDecay(Predicate<String> path, double decay) {
        decays.add(new Rule(path, OffloadStreamAdamW.nonNegative("weight decay", decay)));
    }

    void addMultiplier(Predicate<String> path, double multiplier) {
        multipliers.add(
                new Rule(
                        path,
                        OffloadStreamAdamW.nonNegative("learning-rate multiplier", multiplier)));
    }

    /** Biases and norm gains (rank 0 and 1) aren't decayed unless a group says so. */
    double decay(String path, int rank, double standard) {
        return first(decays, path, rank <= 1 ? 0 : standard);
    }

    double multiplier(String path) {
        return first(multipliers, path, 1);
    }

    private static double first(List<Rule> rules, String path, double otherwise) {
        for (Rule rule : rules) {
            if (rule.path.test(path)) {
                return rule.value;
            }
        }
        return otherwise;
    }
}
