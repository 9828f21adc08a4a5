package org.djlmoe.examples.bench;

import ai.djl.ndarray.NDArray;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.plan.PeakMeter;

/**
 * The program of a child: {@code WORKLOAD CASE [OPTION=VALUE ...]}. It obeys the lines of standard
 * input until they end, and answers each on standard output.
 */
final class ChildMain {

    static final String ANSWER = "answer ";

    /** A turn takes so long and so many runs at least, but begins none after the second limit. */
    private static final double TURN_SECONDS = 0.3;

    private static final int TURN_RUNS = 3;
    private static final double TURN_LIMIT = 1;

    private ChildMain() {}

    /**
     * Runs a child.
     *
     * @param args the workload's class, the case, its options
     * @throws Exception whatever the workload throws; the parent shows the end of it
     */
    public static void main(String[] args) throws Exception {
        PrintStream answers = System.out;
        // What libraries print must not be taken for an answer.
        System.setOut(System.err);
        Map<String, String> options = new LinkedHashMap<>();
        for (int i = 2; i < args.length; i++) {
            int sign = args[i].indexOf('=');
            options.put(args[i].substring(0, sign), args[i].substring(sign + 1));
        }
        BufferedReader commands =
                new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        try (Workload workload = create(args[0], new CaseSettings(args[1], options))) {
            answers.println(ANSWER + "ready");
            for (String line = commands.readLine(); line != null; line = commands.readLine()) {
                answers.println(ANSWER + obey(line, workload));
            }
        }
        System.exit(0);
    }

    private static Workload create(String name, CaseSettings settings) throws Exception {
        try {
            return Class.forName(name)
                    .asSubclass(Workload.class)
                    .getConstructor(CaseSettings.class)
                    .newInstance(settings);
        } catch (InvocationTargetException e) {
            if (e.getCause() instanceof Exception cause) {
                throw cause;
            }
            throw e;
        }
    }

    /**
     * Runs for a while, since the first run after another program's is colder than one in a loop.
     *
     * @return the median of the seconds
     */
    private static double turn(Workload workload) {
        List<Double> runs = new ArrayList<>();
        long begin = System.nanoTime();
        double total = 0;
        while (total < TURN_SECONDS || total < TURN_LIMIT && runs.size() < TURN_RUNS) {
            workload.prepare();
            long start = System.nanoTime();
            workload.run();
            long end = System.nanoTime();
            runs.add((end - start) / 1e9);
            // What prepares it counts here.
            total = (end - begin) / 1e9;
        }
        return BenchReport.median(runs);
    }

    private static String obey(String line, Workload workload) throws IOException {
        if (line.equals("run")) {
            workload.prepare();
            workload.run();
            return "done";
        } else if (line.equals("turn")) {
            return String.valueOf(turn(workload));
        } else if (line.equals("warm-up")) {
            workload.warmUp();
            return "warm";
        } else if (line.equals("peak")) {
            workload.prepare();
            System.gc();
            try (PeakMeter meter = PeakMeter.start()) {
                workload.run();
                return String.valueOf(meter.stop().aboveBase() - workload.residentBytes());
            }
        } else if (line.equals("figures")) {
            StringBuilder text = new StringBuilder();
            workload.figures().forEach((k, v) -> text.append(k).append('=').append(v).append(' '));
            return text.toString();
        } else if (line.startsWith("write ")) {
            Map<String, NDArray> results = workload.results();
            TensorFile.write(results, Path.of(line.substring("write ".length())));
            results.values().forEach(NDArray::close);
            return "written";
        }
        throw new IllegalArgumentException("Unknown command: " + line);
    }
}
