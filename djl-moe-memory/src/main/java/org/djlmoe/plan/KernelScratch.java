package org.djlmoe.plan;

import org.djlmoe.dispatch.ChunkSchedule;
import org.djlmoe.kernel.ExpertScratch;
import org.djlmoe.model.MoeConfig;

/**
 * What the kernels hold besides their arguments, found by going through their text line by line and
 * keeping count: {@link #take} where a line makes an array, {@link #drop} behind its last use,
 * which is when TorchScript frees it.
 *
 * <p>Rows and widths are in elements, counts in bytes. Arrays of a few numbers a row or of an
 * expert's size are left out where larger ones stand beside them. Change this together with {@code
 * attention.py}, {@code expert.py}, {@code mask.py}, {@code norm.py} and {@code vocab.py}.
 */
final class KernelScratch {

    private static final long F32 = 4;
    private static final long BF16 = 2;
    private static final long I64 = 8;

    /** Bytes of index arithmetic for a slot of a received row. */
    private static final long GROUPING = 60;

    private final long h;
    private final long inner;
    private final long experts;
    private final long k;
    private final long queries;
    private final long keys;
    private final MoeConfig config;
    private final long r;
    private final long widest;
    private final boolean training;
    private final boolean half;
    private final boolean trainsAll;

    private long live;
    private long peak;

    private KernelScratch(MoeConfig config, PlanSettings settings) {
        this.config = config;
        h = config.hiddenSize();
        inner = config.intermediateSize();
        experts = config.numExperts();
        k = config.topK();
        queries = (long) config.numHeads() * config.headDim();
        keys = (long) config.numKeyValueHeads() * config.headDim();
        r = settings.loraRank();
        widest = Math.max(inner, settings.sharedWidth());
        training = !settings.evaluation();
        half = settings.frozenHalf();
        trainsAll = settings.trained() == PlanSettings.Trained.ALL;
    }

    private long take(long bytes) {
        live += bytes;
        peak = Math.max(peak, live);
        return bytes;
    }

    private void drop(long bytes) {
        live -= bytes;
    }

    private long finish() {
        if (live != 0) {
            throw new AssertionError("a walk ends with " + live + " bytes");
        }
        return peak;
    }

    // norm.py

    /** Leaves the normed rows. */
    private long norm(long rows) {
        long wide = rows * h * F32;
        long rstd = rows * F32;
        take(wide); // x * x
        take(rstd);
        drop(wide);
        take(wide); // x * rstd
        drop(rstd);
        take(wide); // * gamma
        drop(wide);
        return wide;
    }

    /** Leaves the gradient of x; drops that of the output at its last use if it is a temporary. */
    private long normBackward(long rows, boolean ownsGradient) {
        long wide = rows * h * F32;
        take(wide); // x * x
        drop(wide);
        take(wide); // xhat
        if (trainsAll) {
            take(wide); // dh * xhat
            drop(wide);
        }
        take(wide); // g
        if (ownsGradient) {
            drop(wide);
        }
        take(wide); // g * xhat
        drop(wide);
        take(wide); // xhat * mean
        drop(wide); // xhat
        take(wide); // the difference
        drop(2 * wide);
        return wide;
    }

    /** A product; leaves the result. */
    private long project(long rows, long out) {
        return take(rows * out * F32);
    }

    private static long normRows(MoeConfig config, PlanSettings settings) {
        return Math.min(settings.tokens(), Math.max(1, 262144 / config.hiddenSize()));
    }

    static long normForward(MoeConfig config, PlanSettings settings) {
        KernelScratch s = new KernelScratch(config, settings);
        s.drop(s.norm(normRows(config, settings)));
        return s.finish();
    }

    static long normBackward(MoeConfig config, PlanSettings settings) {
        KernelScratch s = new KernelScratch(config, settings);
        s.drop(s.normBackward(normRows(config, settings), false));
        return s.finish();
    }

    // attention.py

    /** Turns an array into its rotation, of the same size. */
    private void rotate(long bytes) {
        long part = bytes / 2;
        take(3 * part); // a cos, b sin, their difference
        drop(2 * part);
        take(2 * part); // b cos, a sin
        drop(bytes); // x itself
        take(part); // their sum
        drop(2 * part);
        take(bytes); // cat
        drop(2 * part);
    }

    private long rotaryTable(long sequence) {
        long half = sequence * config.headDim() / 2 * F32;
        take(3 * half); // angles, cos, sin
        drop(half);
        return 2 * half;
    }

    /** Leaves q, k and v, each of all query heads. */
    private void projectHeads(long rows, long sequence, boolean lastUseOfH) {
        boolean grouped = keys != queries;
        long table = rotaryTable(sequence);
        rotate(project(rows, queries));
        rotate(project(rows, keys));
        drop(table);
        project(rows, keys);
        if (lastUseOfH) {
            drop(rows * h * F32);
        }
        for (int i = 0; grouped && i < 2; i++) {
            take(rows * queries * F32);
            drop(rows * keys * F32);
        }
    }

    private boolean windowed(long sequence) {
        return config.slidingWindow() > 0 && sequence > config.slidingWindow();
    }

    private long mask() {
        long window = config.slidingWindow();
        return 2 * window * window * F32;
    }

    /** Leaves out and log-sum-exp beside q, k and v. */
    private long attend(long rows, long sequence) {
        long out = rows * queries * F32;
        long lse = rows * config.numHeads() * F32;
        if (windowed(sequence)) {
            long mask = take(mask());
            take(out + lse); // by windows
            take(out + lse); // cat
            drop(out + lse);
            drop(mask);
        } else {
            take(out + lse);
        }
        return lse;
    }

    private static long attentionRows(PlanSettings settings) {
        long step = Math.max(1, 4096 / settings.sequence()) * (long) settings.sequence();
        return Math.min(settings.tokens(), step);
    }

    static long attentionForward(MoeConfig config, PlanSettings settings) {
        KernelScratch s = new KernelScratch(config, settings);
        long rows = attentionRows(settings);
        long wide = rows * s.queries * F32;
        s.norm(rows);
        s.projectHeads(rows, settings.sequence(), true);
        long lse = s.attend(rows, settings.sequence());
        s.drop(3 * wide + lse);
        long out = s.project(rows, s.h);
        s.drop(wide + out);
        return s.finish();
    }

    static long attentionBackward(MoeConfig config, PlanSettings settings) {
        KernelScratch s = new KernelScratch(config, settings);
        long sequence = settings.sequence();
        long rows = attentionRows(settings);
        long wide = rows * s.queries * F32;
        long narrow = rows * s.keys * F32;
        long hidden = s.norm(rows);
        s.projectHeads(rows, sequence, false);
        long lse = s.attend(rows, sequence);
        s.project(rows, s.queries); // dout
        if (s.windowed(sequence)) {
            long window = config.slidingWindow();
            long piece = Math.max(1, rows / sequence) * s.queries * F32;
            long part =
                    piece * Math.min(sequence, window) + 2 * piece * Math.min(sequence, 2 * window);
            long mask = s.take(s.mask());
            s.take(3 * wide + part); // dk, dv, dq by windows; one window's
            s.drop(part);
            s.take(wide); // cat
            s.drop(wide + mask);
        } else {
            s.take(3 * wide); // dq, dk, dv
        }
        s.drop(3 * wide + wide + lse + wide); // q, k, v, out, lse, dout

        long table = s.rotaryTable(sequence);
        s.rotate(wide);
        s.take(wide); // join
        s.drop(wide);
        if (narrow != wide) {
            s.take(narrow);
            s.drop(wide);
        }
        s.rotate(narrow);
        s.take(narrow);
        s.drop(narrow + table);
        if (narrow != wide) {
            s.take(narrow);
            s.drop(wide);
        }
        s.drop(hidden);
        s.project(rows, s.h);
        s.drop(wide);
        for (int i = 0; i < 2; i++) {
            s.project(rows, s.h);
            s.drop(narrow);
            s.take(hidden); // the sum
            s.drop(2 * hidden);
        }
        s.drop(s.normBackward(rows, true));
        return s.finish();
    }

    // expert.py

    /** Positions grouped by expert; leaves order, rows and combine weights. */
    private long groupRoutes(long tokens) {
        long ids = tokens * k * I64;
        long weights = tokens * k * F32;
        take(ids); // flat
        take(4 * ids); // sorted values and order, and the sort's own copies
        drop(4 * ids);
        take(ids); // rows
        take(2 * weights); // in token order, in expert order
        drop(weights);
        return 2 * ids + weights;
    }

    /** Rows that go through an expert, or the router, at a time in backward. */
    private long block(PlanSettings settings) {
        return ExpertScratch.blockRows(
                settings.chunk(), (int) k, PlanSettings.ceil(experts, settings.ranks()));
    }

    /** What a pass through the layer holds from its first chunk to its last. */
    private long scratch(long block, boolean backward) {
        return take(ExpertScratch.bytes(block, h, widest, r, half, backward));
    }

    static long moeForward(MoeConfig config, PlanSettings settings) {
        KernelScratch s = new KernelScratch(config, settings);
        long block =
                ExpertScratch.forwardRows(
                        settings.chunk(), s.block(settings), s.h, s.widest, s.r, s.half);
        long scratch = s.scratch(block, false);
        long logits = s.take(block * s.experts * F32);
        s.take(3 * logits); // sorted values, order
        long chosen = s.take(block * s.k * I64);
        s.drop(3 * logits);
        s.take(logits); // softmax
        s.drop(logits);
        if (s.training) {
            s.take(4 * logits); // without padding, softmax, the same in F64
            s.drop(4 * logits);
        }
        s.drop(logits + chosen);
        s.drop(s.groupRoutes(settings.tokens()));
        s.drop(scratch);
        return s.finish();
    }

    static long moeBackward(MoeConfig config, PlanSettings settings) {
        KernelScratch s = new KernelScratch(config, settings);
        long block = s.block(settings);
        long scratch = s.scratch(block, true);
        long routes = s.groupRoutes(settings.tokens());
        long dalpha = settings.tokens() * s.k * F32;
        s.take(2 * dalpha); // by expert, by token
        long logits = block * s.experts * F32;
        s.take(6 * logits); // logits, their gradient, softmax, three terms of the losses'
        s.drop(6 * logits);
        s.drop(2 * dalpha + routes + scratch);
        if (!settings.trainsMask()) {
            return s.finish();
        }
        // What the pass reports of the combine weights stays for the mask's own pass behind it.
        return dalpha + Math.max(s.finish(), maskBackward(config, settings));
    }

    // mask.py

    private static long maskBackward(MoeConfig config, PlanSettings settings) {
        KernelScratch s = new KernelScratch(config, settings);
        long chosen = settings.tokens() * s.k * F32;
        s.take(2 * chosen); // dw, w dw
        s.take(2 * chosen); // the same in F64
        s.drop(4 * chosen);
        long extra = Math.min(settings.excludedExperts(), s.experts - s.k);
        if (extra == 0) {
            return s.finish();
        }
        long block = s.block(settings);
        long scratch = s.scratch(block, true);
        long excluded = settings.tokens() * extra;
        s.take(excluded * (I64 + F32)); // best, w
        long logits = block * s.experts * F32;
        s.take(2 * logits); // the same without what is kept
        s.take(3 * logits); // sorted values, order
        s.drop(5 * logits);
        s.take(5 * excluded * I64); // flat, sorted values and order, and the sort's own copies
        s.drop(4 * excluded * I64);
        s.take(excluded * (I64 + F32)); // token, grouped
        s.drop(excluded * I64);
        s.take(excluded * F32); // dw
        s.drop(excluded * (I64 + F32)); // order, grouped
        s.take(excluded * F32); // w dw
        s.take(excluded * 2 * F32); // the same in F64
        s.drop(excluded * (I64 + 5 * F32) + scratch);
        return s.finish();
    }

    // org.djlmoe.dispatch

    /**
     * Rows on their way between ranks, and what says where they go. In a layer of several chunks
     * the buffers are of this size; in one chunk, at most.
     */
    static long dispatchRows(MoeConfig config, PlanSettings settings, boolean backward) {
        long ranks = settings.ranks();
        if (ranks == 1) {
            return 0;
        }
        long h = config.hiddenSize();
        long k = config.topK();
        long c = settings.chunk();
        long chunks = PlanSettings.ceil(settings.tokens(), c);
        long received = ranks * c;
        if (settings.spreadsRoutes()) {
            double slack = Math.max(settings.alpha(), settings.lambda());
            long routes = (long) Math.ceil(slack * settings.tokens() * k);
            received =
                    Math.min(
                            received,
                            chunks == 1 ? routes : ChunkSchedule.bound(routes, (int) chunks));
        }
        long sent = c * Math.min(k, ranks - 1);
        long packed = h + 2 * k;
        // Of a single chunk's buffers, some are used again for its results.
        boolean one = chunks == 1;
        long numbers = (one ? 2 : 3) * received * packed + sent * packed + (one ? 0 : sent * h);
        if (backward) {
            numbers =
                    (one ? 2 : 3) * received * packed
                            + (one ? 1 : 2) * received * h
                            + sent * (packed + h)
                            + (one ? 0 : sent * (h + k));
        }
        long indices = F32 * settings.tokens() * k + 8 * (config.numExperts() + 1L);
        return numbers * F32 + indices + (one ? 1 : 3) * I64 * (sent + c);
    }

    /** What a kernel needs to group the rows of a chunk by expert, beside the rows. */
    static long dispatchGrouping(MoeConfig config, PlanSettings settings) {
        if (settings.ranks() == 1) {
            return 0;
        }
        return GROUPING * config.topK() * settings.ranks() * settings.chunk();
    }

    /** Weights of experts that other ranks lend, as many as a rank may hold; their gradients. */
    static long lentExperts(MoeConfig config, PlanSettings settings, boolean backward) {
        long foreign = lent(config, settings);
        if (foreign == 0) {
            return 0;
        }
        long expert = 3L * config.hiddenSize() * config.intermediateSize();
        long gradients =
                backward && settings.trained() == PlanSettings.Trained.ALL
                        ? (foreign + 1) * expert * F32
                        : 0;
        return foreign * expert * (settings.frozenHalf() ? BF16 : F32) + gradients;
    }

    /** How many experts other ranks may lend to one. */
    static long lent(MoeConfig config, PlanSettings settings) {
        if (!settings.spreadsRoutes()) {
            return 0;
        }
        long most = config.numExperts() - config.numExperts() / settings.ranks();
        long share = PlanSettings.ceil(config.numExperts(), settings.ranks());
        return Math.min(most, Math.max(settings.maxForeign(), share));
    }

    /** The normed rows, which travel. */
    static long dispatchNormed(MoeConfig config, PlanSettings settings) {
        return settings.ranks() == 1 ? 0 : settings.tokens() * config.hiddenSize() * F32;
    }

    // vocab.py

    /** Beside the logits of a block. */
    static long vocab(MoeConfig config, PlanSettings settings) {
        long block = Math.min(settings.vocabBlockTokens(), settings.tokens());
        long rows = block * config.hiddenSize() * F32;
        return settings.evaluation() ? rows : 2 * rows; // x; and the block's gradient of it
    }
}
