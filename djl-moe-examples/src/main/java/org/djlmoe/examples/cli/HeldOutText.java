package org.djlmoe.examples.cli;

import java.io.IOException;
import java.util.Locale;
import java.util.Objects;
import java.util.function.Consumer;
import org.djlmoe.data.PackedTokens;
import org.djlmoe.examples.text.Language;
import org.djlmoe.examples.text.TextData;
import org.djlmoe.maskcoft.ExpertPrior;
import org.djlmoe.training.Evaluation;
import org.djlmoe.training.LanguageModel;
import picocli.CommandLine.Mixin;
import picocli.CommandLine.Option;

/** The options that say on which text, and under which prior, a model is evaluated; a mixin. */
final class HeldOutText {

    private static final int MAX_SEQUENCE = 256;

    enum Split {
        VALIDATION,
        TEST
    }

    @Option(
            names = "--language",
            paramLabel = "CODE",
            description = "Text of one language only, such as de (default: all of them).")
    private String language;

    @Option(
            names = "--split",
            paramLabel = "SPLIT",
            description = "Which held-out text: ${COMPLETION-CANDIDATES} (default: validation).")
    private Split split;

    @Option(
            names = "--rows",
            paramLabel = "N",
            description = "Rows, evenly spaced over the text (default: 256, or all if fewer).")
    private Integer rows;

    @Option(names = "--batch", paramLabel = "N", description = "Rows at a time (default: 16).")
    private Integer batch;

    @Option(
            names = "--sequence",
            paramLabel = "N",
            description =
                    "Tokens a row (default: a quarter of the model's longest, at most "
                            + MAX_SEQUENCE
                            + ").")
    private Integer sequence;

    @Option(
            names = "--prior",
            paramLabel = "none|hard|BETA",
            description =
                    "How strongly the model's preferred experts are preferred: not at all, no"
                            + " others, or a strength (default: what its "
                            + ExpertPrior.FILE
                            + " says, none without one).")
    private String prior;

    @Mixin private AdapterFolder adapter;

    /** Fails if one of these options was given, which nothing would look at. */
    static void refuse(String why, CommonOptions options) {
        options.refuse(
                why,
                "--language",
                "--split",
                "--rows",
                "--batch",
                "--sequence",
                "--prior",
                "--adapter");
    }

    /** Evaluates the model of a folder. */
    Run evaluate(CheckpointFolder folder, CommonOptions options) throws IOException {
        return evaluate(folder, options, model -> {});
    }

    /**
     * Evaluates the model of a folder.
     *
     * @param also what else to do with the model, under the same prior
     */
    Run evaluate(CheckpointFolder folder, CommonOptions options, Consumer<LanguageModel> also)
            throws IOException {
        int wanted = Objects.requireNonNullElse(rows, 256);
        int rowsAtOnce = Objects.requireNonNullElse(batch, 16);
        int longest = folder.config().maxPositionEmbeddings();
        int length =
                Objects.requireNonNullElse(
                        sequence, Math.max(1, Math.min(longest / 4, MAX_SEQUENCE)));
        Arguments.positive("--rows", wanted);
        Arguments.positive("--batch", rowsAtOnce);
        Arguments.positive("--sequence", length);
        if (length > longest) {
            throw new UserError(
                    "--sequence " + length + " exceeds the model's " + longest + " positions");
        }
        Split part = Objects.requireNonNullElse(split, Split.VALIDATION);
        Language only = Arguments.language(language);
        ExpertPrior chosen = adapter.prior(folder).prior(prior);
        TextData data = TextData.load(only, length);
        PackedTokens text = part == Split.TEST ? data.test() : data.validation();
        int taken = Math.min(wanted, text.rows());
        try (LanguageModel model = folder.load();
                ProgressBar bar = options.progress("evaluating", taken).optUnit("tokens").build()) {
            adapter.merge(model);
            if (chosen != null) {
                chosen.apply(model.decoder());
            }
            long[] before = {0};
            long start = System.nanoTime();
            Evaluation evaluation =
                    Evaluation.of(
                            model,
                            text.sample(taken, rowsAtOnce),
                            done -> {
                                long tokens = done - before[0];
                                bar.advance(tokens / length, tokens);
                                before[0] = done;
                            });
            double seconds = (System.nanoTime() - start) / 1e9;
            bar.close();
            also.accept(model);
            return new Run(
                    evaluation,
                    seconds,
                    only == null ? null : only.code(),
                    part.name().toLowerCase(Locale.ROOT),
                    taken,
                    length,
                    PriorFigures.of(chosen));
        }
    }

    /** An evaluation and what it was made on. */
    record Run(
            Evaluation evaluation,
            double seconds,
            String language,
            String split,
            int rows,
            int sequence,
            PriorFigures prior) {

        @Override
        public String toString() {
            return String.format(
                    Locale.ROOT,
                    "%s text, %s, %d rows of %d tokens, prior: %s",
                    split,
                    language == null ? "all languages" : language,
                    rows,
                    sequence,
                    prior == null ? "none" : prior);
        }
    }

    /** A prior as a file shows it; an infinite beta, the hard mask, is a string. */
    record PriorFigures(String form, Object beta, int protected_top) {

        static PriorFigures of(ExpertPrior prior) {
            if (prior == null) {
                return null;
            }
            return new PriorFigures(
                    prior.prior().form().name().toLowerCase(Locale.ROOT),
                    prior.prior().isHardMask() ? "infinity" : (Object) prior.prior().beta(),
                    prior.prior().protectedTop());
        }

        @Override
        public String toString() {
            return beta instanceof String
                    ? "hard mask"
                    : form + ", beta " + beta + ", first " + protected_top + " protected";
        }
    }
}
