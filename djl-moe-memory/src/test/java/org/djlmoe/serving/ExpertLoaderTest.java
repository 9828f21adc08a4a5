package org.djlmoe.serving;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.Semaphore;
import org.junit.jupiter.api.Test;

class ExpertLoaderTest {

    /** Notes what is read, one read a permit. */
    private static final class Gated implements ExpertStore {
        final Semaphore begun = new Semaphore(0);
        final Semaphore permits = new Semaphore(0);
        final List<Integer> order = Collections.synchronizedList(new ArrayList<>());

        @Override
        public ExpertLayout layout() {
            return new ExpertLayout(1, 16, 1, 1, false);
        }

        @Override
        public void read(int layer, int expert, ByteBuffer target) throws IOException {
            begun.release();
            permits.acquireUninterruptibly();
            order.add(expert);
            if (expert == 13) {
                throw new IOException("unlucky");
            }
        }

        @Override
        public String describe() {
            return "gated store";
        }

        @Override
        public void close() {}
    }

    private final Gated store = new Gated();
    private final ByteBuffer target = ByteBuffer.allocate(12);

    @Test
    void loads_demandedOnes_overtakeSpeculativeOnes() {
        try (ExpertLoader loader = new ExpertLoader(store)) {
            ExpertLoader.Load running = loader.demand(0, 0, target);
            store.begun.acquireUninterruptibly();
            loader.speculate(0, 1, target);
            ExpertLoader.Load wanted = loader.speculate(0, 2, target);
            ExpertLoader.Load third = loader.demand(0, 3, target);
            loader.promote(wanted);
            store.permits.release(4);
            loader.await(running);
            loader.await(third);
            loader.await(wanted);
            assertEquals(List.of(0, 3, 2), List.copyOf(store.order.subList(0, 3)));
        }
    }

    @Test
    void cancel_onlyBeforeTheReadBegins() {
        try (ExpertLoader loader = new ExpertLoader(store)) {
            ExpertLoader.Load running = loader.speculate(0, 0, target);
            store.begun.acquireUninterruptibly();
            ExpertLoader.Load waiting = loader.speculate(0, 1, target);
            assertFalse(loader.cancel(running));
            assertFalse(loader.hasEnded(running));
            assertTrue(loader.cancel(waiting));
            store.permits.release();
            loader.await(running);
            assertTrue(loader.hasEnded(running));
            assertTrue(loader.nanos(running) > 0);
        }
        assertEquals(List.of(0), store.order);
    }

    @Test
    void await_failedRead_errorNamesTheExpertAndTheNextOneIsRead() {
        store.permits.release(2);
        try (ExpertLoader loader = new ExpertLoader(store)) {
            ExpertLoader.Load bad = loader.demand(0, 13, target);
            ExpertLoader.Load good = loader.demand(0, 4, target);
            UncheckedIOException e =
                    assertThrows(UncheckedIOException.class, () -> loader.await(bad));
            assertEquals(
                    "Cannot load expert 13 of layer 0 from gated store: unlucky", e.getMessage());
            loader.await(good);
        }
    }

    @Test
    void close_waitingLoads_areDroppedAndNewOnesRefused() throws InterruptedException {
        ExpertLoader loader = new ExpertLoader(store);
        loader.demand(0, 0, target);
        store.begun.acquireUninterruptibly();
        loader.demand(0, 1, target);
        Thread closer = new Thread(loader::close);
        closer.start();
        boolean refused = false;
        while (!refused) {
            try {
                loader.cancel(loader.speculate(0, 2, target));
            } catch (IllegalStateException e) {
                refused = true;
            }
        }
        store.permits.release();
        closer.join();
        assertEquals(List.of(0), store.order);
    }
}
