package org.djlmoe.optimizer;

import ai.djl.training.tracker.ParameterTracker;
import java.util.List;
import java.util.function.Predicate;
import org.djlmoe.optimizer.UpdatePlan.Group;

/** With which learning rate and which weight decay a parameter is updated. */
final class ParameterGroups {

    /** A number for some parameters; of several rules the first that matches counts. */
    record Rule(Predicate<String> path, double value) {}

    private final ParameterTracker learningRate;
    private final List<Rule> multipliers;
    private final double decay;
    private final List<Rule> decays;

    /**
     * Creates groups.
     *
     * @param learningRate by path and number of the step
     * @param multipliers of the learning rate, 1 where no rule matches
     * @param decay of what no rule matches, for parameters of rank 2 and above
     * @param decays of the others
     */
    ParameterGroups(
            ParameterTracker learningRate,
            List<Rule> multipliers,
            double decay,
            List<Rule> decays) {
        this.learningRate = learningRate;
        this.multipliers = List.copyOf(multipliers);
        this.decay = decay;
        this.decays = List.copyOf(decays);
    }

    /** Returns what a step updates a parameter with. */
    Group of(String path, int rank, int step) {
        double rate = learningRate.getNewValue(path, step) * first(multipliers, path, 1);
        if (!(rate >= 0) || Double.isInfinite(rate)) {
            throw new IllegalArgumentException(
                    "The learning rate of "
                            + path
                            + " must be 0 or above and finite, but is "
                            + rate
                            + " at update "
                            + step);
        }
        // Biases and norm gains are not decayed unless a group says so.
        return new Group(rate, first(decays, path, rank <= 1 ? 0 : decay), false);
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
