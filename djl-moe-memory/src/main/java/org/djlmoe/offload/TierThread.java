package org.djlmoe.offload;

import ai.djl.ndarray.NDScope;
import java.util.concurrent.Callable;
import java.util.concurrent.CancellationException;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.djlmoe.autograd.GradMode;

/**
 * The one thread that reads and writes a tier, in the order of requests. All reads and writes
 * happen here: an interrupt of a user's thread would close a file under it.
 */
final class TierThread implements AutoCloseable {

    private final ExecutorService executor =
            Executors.newSingleThreadExecutor(
                    task -> {
                        Thread thread = new Thread(task, "boundary-offload");
                        thread.setDaemon(true);
                        return thread;
                    });

    <T> Future<T> submit(Callable<T> job) {
        return executor.submit(
                () -> {
                    // A new thread starts with the gradient mode on.
                    try (GradMode off = GradMode.off();
                            NDScope scope = new NDScope()) {
                        return job.call();
                    }
                });
    }

    /** Waits for a result. An interrupt ends the wait, not the job. */
    static <T> T await(Future<T> job, String doing) {
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

    /** Waits until a job no longer touches memory, whatever came of it. */
    static void settle(Future<?> job) {
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
