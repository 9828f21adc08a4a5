package org.djlmoe.serving;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.util.ArrayDeque;
import java.util.Deque;

/**
 * The one thread that reads experts into slots. What was asked for comes first, in order; what may
 * be asked for soon comes when nothing else waits.
 *
 * <p>All reads happen here, also because an interrupt of a user's thread would close a file under
 * it.
 */
final class ExpertLoader implements AutoCloseable {

    private final ExpertStore store;
    private final Thread thread;
    private final Object lock = new Object();
    private final Deque<Load> demanded = new ArrayDeque<>();
    private final Deque<Load> speculative = new ArrayDeque<>();
    private boolean closed;

    ExpertLoader(ExpertStore store) {
        this.store = store;
        thread = new Thread(this::work, "expert-loader");
        thread.setDaemon(true);
        thread.start();
    }

    /** How far a load is. */
    private enum State {
        WAITING,
        RUNNING,
        ENDED
    }

    /** One expert on its way into a slot. */
    static final class Load {

        private final int layer;
        private final int expert;
        private final ByteBuffer target;
        private State state = State.WAITING;
        private Throwable failure;
        private long nanos;

        Load(int layer, int expert, ByteBuffer target) {
            this.layer = layer;
            this.expert = expert;
            this.target = target;
        }

        int layer() {
            return layer;
        }

        int expert() {
            return expert;
        }
    }

    /** Queues a load that somebody will wait for. */
    Load demand(int layer, int expert, ByteBuffer target) {
        return enqueue(demanded, new Load(layer, expert, target));
    }

    /** Queues a load that may turn out to be wanted. */
    Load speculate(int layer, int expert, ByteBuffer target) {
        return enqueue(speculative, new Load(layer, expert, target));
    }

    private Load enqueue(Deque<Load> queue, Load load) {
        synchronized (lock) {
            if (closed) {
                throw new IllegalStateException("The experts are closed");
            }
            queue.add(load);
            lock.notifyAll();
        }
        return load;
    }

    /** Moves a speculative load that turned out to be wanted to those that are waited for. */
    void promote(Load load) {
        synchronized (lock) {
            if (speculative.remove(load)) {
                demanded.add(load);
            }
        }
    }

    /** Takes a speculative load back; returns whether its slot is and stays untouched. */
    boolean cancel(Load load) {
        synchronized (lock) {
            return speculative.remove(load);
        }
    }

    boolean hasEnded(Load load) {
        synchronized (lock) {
            return load.state == State.ENDED;
        }
    }

    /**
     * Waits for a load.
     *
     * @return nanoseconds spent waiting
     * @throws UncheckedIOException if it could not be read
     */
    long await(Load load) {
        synchronized (lock) {
            if (load.state != State.ENDED) {
                long start = System.nanoTime();
                while (load.state != State.ENDED) {
                    try {
                        lock.wait();
                    } catch (InterruptedException e) {
                        Thread.currentThread().interrupt();
                        throw new IllegalStateException(
                                "Interrupted while waiting for expert "
                                        + load.expert
                                        + " of layer "
                                        + load.layer,
                                e);
                    }
                }
                long waited = System.nanoTime() - start;
                check(load);
                return waited;
            }
            check(load);
            return 0;
        }
    }

    /** Returns how long a load that has ended took. */
    long nanos(Load load) {
        synchronized (lock) {
            return load.nanos;
        }
    }

    private void check(Load load) {
        if (load.failure != null) {
            String message =
                    "Cannot load expert %d of layer %d from %s: %s"
                            .formatted(
                                    load.expert,
                                    load.layer,
                                    store.describe(),
                                    load.failure.getMessage());
            if (load.failure instanceof IOException) {
                throw new UncheckedIOException(message, (IOException) load.failure);
            }
            throw new IllegalStateException(message, load.failure);
        }
    }

    private void work() {
        while (true) {
            Load load;
            synchronized (lock) {
                while (!closed && demanded.isEmpty() && speculative.isEmpty()) {
                    try {
                        lock.wait();
                    } catch (InterruptedException e) {
                        // Nobody has this thread to interrupt it; closing ends it.
                    }
                }
                if (closed) {
                    return;
                }
                load = demanded.isEmpty() ? speculative.remove() : demanded.remove();
                load.state = State.RUNNING;
            }
            long start = System.nanoTime();
            Throwable failure = null;
            try {
                store.read(load.layer, load.expert, load.target);
            } catch (IOException | RuntimeException | Error e) {
                // Whoever waits for this expert gets the error; the thread goes on.
                failure = e;
            }
            synchronized (lock) {
                load.nanos = System.nanoTime() - start;
                load.failure = failure;
                load.state = State.ENDED;
                lock.notifyAll();
            }
        }
    }

    /** Drops what waits, lets a running read end, and ends the thread. */
    @Override
    public void close() {
        synchronized (lock) {
            closed = true;
            demanded.clear();
            speculative.clear();
            lock.notifyAll();
        }
        boolean interrupted = false;
        while (thread.isAlive()) {
            try {
                thread.join();
            } catch (InterruptedException e) {
                interrupted = true;
            }
        }
        if (interrupted) {
            Thread.currentThread().interrupt();
        }
    }
}
