package org.djlmoe.autograd;

import ai.djl.ndarray.NDScope;
import java.util.concurrent.Callable;
import java.util.concurrent.CancellationException;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;

/**
 * A thread that runs jobs on arrays in the order of requests, beside the training thread: with the
 * gradient mode off, and with the arrays that a job makes closed at its end.
 *
 * <p>Files are read and written here also because an interrupt of a user's thread would close a
 * file under it.
 */
public final class WorkerThread implements AutoCloseable {

    private final ExecutorService executor;

    /**
     * Creates a thread; it starts with its first job.
     *
     * @param name its name
     */
    public WorkerThread(String name) {
        executor =
                Executors.newSingleThreadExecutor(
                        task -> {
                            Thread thread = new Thread(task, name);
                            thread.setDaemon(true);
                            return thread;
                        });
    }

    /**
     * Has a job run after those asked for before.
     *
     * @param job what to do
     * @param <T> the type of its result
     * @return its result to come
     */
    public <T> Future<T> submit(Callable<T> job) {
        return executor.submit(
                () -> {
                    // A new thread starts with the gradient mode on.
                    try (GradMode off = GradMode.off();
                            NDScope scope = new NDScope()) {
                        return job.call();
                    }
                });
    }

    /**
     * Waits for a result. An interrupt ends the wait, not the job.
     *
     * @param job the job
     * @param doing what is waited for, for the message of an interrupt
     * @param <T> the type of the result
     * @return the result
     */
    public static <T> T await(Future<T> job, String doing) {
        try {
            return job.get();
        } catch (InterruptedException e) {
            Thread.currentThread().interrupt();
            throw new IllegalStateException("Interrupted while " + doing, e);
        } catch (ExecutionException e) {
            throw rethrown(e.getCause());
        }
    }

    private static RuntimeException rethrown(Throwable cause) {
        if (cause instanceof Error) {
            throw (Error) cause;
        }
        return cause instanceof RuntimeException
                ? (RuntimeException) cause
                : new IllegalStateException(cause);
    }

    /**
     * Waits until a job no longer touches memory, whatever came of it.
     *
     * @param job the job
     */
    public static void settle(Future<?> job) {
        boolean interrupted = false;
        while (true) {
            try {
                job.get();
            } catch (InterruptedException e) {
                interrupted = true;
                continue;
            } catch (ExecutionException | CancellationException e) {
                // Whoever needed the result has the error.
            }
            break;
        }
        if (interrupted) {
            Thread.currentThread().interrupt();
        }
    }

    /** Waits for the jobs asked for so far, then ends the thread. */
    @Override
    public void close() {
        executor.shutdown();
        boolean interrupted = false;
        boolean ended = false;
        while (!ended) {
            try {
                ended = executor.awaitTermination(1, TimeUnit.MINUTES);
            } catch (InterruptedException e) {
                interrupted = true;
            }
        }
        if (interrupted) {
            Thread.currentThread().interrupt();
        }
    }
}
