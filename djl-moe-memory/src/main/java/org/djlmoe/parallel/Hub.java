package org.djlmoe.parallel;

import ai.djl.ndarray.NDArray;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.HashMap;
import java.util.Map;
import java.util.function.BooleanSupplier;

/**
 * What the ranks of an {@link InProcessGroup} share: the collective calls under way, messages that
 * wait for their other half, and the first failure.
 *
 * <p>After a failure nobody begins to touch another's array, and no wait ends before those who
 * already do have finished: then memory may be freed.
 */
final class Hub {

    /** One half of a tensor's way from one rank to another. */
    static final class Message {

        private final NDArray array;
        private final int from;
        private final int to;
        private final boolean sends;
        private boolean delivered;

        Message(NDArray array, int from, int to, boolean sends) {
            this.array = array;
            this.from = from;
            this.to = to;
            this.sends = sends;
        }

        NDArray array() {
            return array;
        }

        int from() {
            return from;
        }

        boolean sends() {
            return sends;
        }
    }

    private final int size;
    private final boolean[] gone;
    private final Map<Long, Round> rounds = new HashMap<>();
    private final Map<String, Deque<Message>> mail = new HashMap<>();
    private ProcessGroupException failure;
    private int touching;

    Hub(int size) {
        this.size = size;
        this.gone = new boolean[size];
    }

    int size() {
        return size;
    }

    synchronized Round join(long number, int rank, String what, Object contribution) {
        check();
        Round round = rounds.computeIfAbsent(number, n -> new Round(what, size));
        if (!round.what.equals(what)) {
            throw new IllegalStateException(
                    "rank " + rank + " calls " + what + " while others call " + round.what);
        }
        round.contributions[rank] = contribution;
        notifyAll();
        return round;
    }

    synchronized Object contribution(Round round, int rank, int of) {
        await(() -> round.contributions[of] != null, rank, of, round.what);
        return round.contributions[of];
    }

    /** Ends a rank's part, when all others have ended theirs. */
    synchronized void leave(Round round, int rank) {
        round.left++;
        if (round.left == size) {
            rounds.values().remove(round);
        }
        notifyAll();
        for (int r = 0; r < size; r++) {
            int of = r;
            await(() -> round.contributions[of] != null, rank, of, round.what);
        }
        await(() -> round.left == size, rank, -1, round.what);
    }

    /** Returns the other half of a message, or keeps this one until that comes. */
    synchronized Message match(Message mine, int rank) {
        check();
        Deque<Message> waiting =
                mail.computeIfAbsent(mine.from + ">" + mine.to, pair -> new ArrayDeque<>());
        if (!waiting.isEmpty() && waiting.peek().sends != mine.sends) {
            return waiting.poll();
        }
        waiting.add(mine);
        return null;
    }

    synchronized void delivered(Message a, Message b) {
        a.delivered = true;
        b.delivered = true;
        notifyAll();
    }

    synchronized void awaitDelivery(Message message, int rank) {
        int other = message.sends ? message.to : message.from;
        await(() -> message.delivered, rank, other, message.sends ? "send" : "receive");
        check();
    }

    /** Runs what touches another rank's array. */
    void touch(int rank, Runnable copy) {
        synchronized (this) {
            check();
            touching++;
        }
        try {
            copy.run();
        } finally {
            synchronized (this) {
                touching--;
                notifyAll();
            }
        }
    }

    private void await(BooleanSupplier condition, int rank, int of, String what) {
        while (!condition.getAsBoolean()) {
            check();
            if (of >= 0 && gone[of]) {
                fail(
                        of,
                        new IllegalStateException(
                                "it left the group while rank "
                                        + rank
                                        + " waits for it in "
                                        + what));
                check();
            }
            doWait();
        }
    }

    private void doWait() {
        try {
            wait();
        } catch (InterruptedException e) {
            // Only transport threads and owners wait here; an owner's interrupt ends the group.
            fail(-1, e);
            Thread.currentThread().interrupt();
            check();
        }
    }

    /** Keeps the first failure; rank -1 is whoever waits for the ranks. */
    synchronized void fail(int rank, Throwable cause) {
        if (failure == null) {
            failure =
                    new ProcessGroupException(
                            (rank < 0
                                            ? "The group was interrupted: "
                                            : "Rank " + rank + " failed: ")
                                    + (cause.getMessage() == null ? cause : cause.getMessage()),
                            cause);
            notifyAll();
        }
    }

    synchronized ProcessGroupException failure() {
        return failure;
    }

    /** Throws if a rank has failed, once nobody touches another's memory. */
    synchronized void check() {
        if (failure == null) {
            return;
        }
        boolean interrupted = Thread.interrupted();
        while (touching > 0) {
            try {
                wait();
            } catch (InterruptedException e) {
                interrupted = true;
            }
        }
        if (interrupted) {
            Thread.currentThread().interrupt();
        }
        // A new one each time, with the stack of who waits.
        throw new ProcessGroupException(failure.getMessage(), failure.getCause());
    }

    synchronized void leaveGroup(int rank) {
        gone[rank] = true;
        notifyAll();
    }
}
