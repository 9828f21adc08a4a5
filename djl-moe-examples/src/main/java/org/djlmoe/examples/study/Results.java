package org.djlmoe.examples.study;

import java.util.List;
import java.util.Objects;
import java.util.stream.LongStream;
import java.util.stream.Stream;

/** The units of a study, by arm and seed. The base, which has no seed, is there for every one. */
final class Results {

    private final List<Figures.Unit> units;
    private final List<Figures.Times> times;

    Results(List<Figures.Unit> units, List<Figures.Times> times) {
        this.units = List.copyOf(units);
        this.times = List.copyOf(times);
    }

    /** Returns the times of the seeds that were timed. */
    List<Figures.Times> times() {
        return times;
    }

    List<Figures.Unit> units() {
        return units;
    }

    /**
     * Finds a sweep.
     *
     * @param arm its arm
     * @param kept what its mask keeps; arms without mask do not look at it
     * @param seed its seed; the base does not look at it
     * @return the sweep, or null if there is none
     */
    Figures.Series series(Arm arm, int kept, long seed) {
        return units.stream()
                .filter(unit -> unit.kept() == 0 || unit.kept() == kept)
                .filter(unit -> arm.model() == Arm.BASE || unit.seed() == seed)
                .flatMap(unit -> unit.series().stream())
                .filter(series -> series.arm() == arm)
                .findFirst()
                .orElse(null);
    }

    /** Returns the sweeps of an arm on those of the seeds that have it. */
    List<Figures.Series> series(Arm arm, int kept, List<Long> seeds) {
        LongStream each =
                seeds.stream().mapToLong(Long::longValue).limit(arm.model() == Arm.BASE ? 1 : 1000);
        Stream<Figures.Series> found = each.mapToObj(seed -> series(arm, kept, seed));
        return found.filter(Objects::nonNull).toList();
    }
}
