package org.djlmoe.kernel;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.engine.Engine;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.GradientCollector;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import org.djlmoe.reference.ProcessMemory;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Assumptions;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

class TorchKernelsTest {

    private static final TorchKernels KERNELS =
            TorchKernels.compile(
                    "sample",
                    """
                    # a comment at the margin
                    def twice(self, x: Tensor) -> Tensor:
                        return x * 2  # and one at the end of a line

                    def both(self, x: Tensor, y: Tensor) -> Tuple[Tensor, Tensor]:
                        return (self.twice(x), x + y)

                    def fill(self, y: Tensor, value: float) -> int:
                        y.fill_(value)
                        return 0

                    def describe(self, i: int, d: float, b: bool, s: str, n: List[int], x: List[Tensor]) -> float:
                        total = float(i) + d + float(len(s))
                        if b:
                            total = total + 1000.0
                        for j in n:
                            total = total + float(j)
                        for t in x:
                            total = total + float(t.numel())
                        return total

                    def positive(self, x: Tensor) -> bool:
                        return bool((x > 0).all().item())

                    def weighted(self, x: Tensor, weights: List[Tensor], y: Tensor) -> Tensor:
                        total = x * y
                        for w in weights:
                            total = total + w
                        return total

                    def optional(self, x: Tensor, bias: Tensor, weights: List[Tensor]) -> Tensor:
                        total = x
                        if bias.numel() > 0:
                            total = total + bias
                        for w in weights:
                            total = total + w
                        return total

                    def product(self, x: Tensor, y: Tensor) -> Tensor:
                        return torch.mm(x, y)
                    """);

    private NDManager manager;

    @BeforeEach
    void open() {
        manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
    }

    @AfterEach
    void close() {
        manager.close();
    }

    private NDArray array(float... values) {
        return manager.create(values);
    }

    @Test
    void compile_textThatIsNoTorchScript_exceptionNamesTheText() {
        KernelException e =
                assertThrows(
                        KernelException.class,
                        () ->
                                TorchKernels.compile(
                                        "broken.py",
                                        "def f(self, x: Tensor) -> Tensor:\n  return x +\n"));
        assertTrue(e.getMessage().contains("broken.py does not compile"), e.getMessage());
    }

    @Test
    void compile_unknownOperator_exceptionNamesTextAndOperator() {
        KernelException e =
                assertThrows(
                        KernelException.class,
                        () ->
                                TorchKernels.compile(
                                        "broken.py",
                                        "def f(self, x: Tensor) -> Tensor:\n"
                                                + "  return torch.no_such_thing(x)\n"));
        assertTrue(e.getMessage().contains("broken.py"), e.getMessage());
        assertTrue(e.getMessage().contains("no_such_thing"), e.getMessage());
    }

    @Test
    void load_missingResource_exceptionNamesIt() {
        KernelException e =
                assertThrows(
                        KernelException.class,
                        () -> TorchKernels.load(TorchKernelsTest.class, "absent.py").run("any"));
        assertTrue(e.getMessage().contains("absent.py"), e.getMessage());
    }

    @Test
    void load_twice_compiledOnce() {
        assertSame(
                TorchKernels.load(NormKernels.class, "norm.py"),
                TorchKernels.load(NormKernels.class, "norm.py"));
    }

    @Test
    void call_arrayAndTuple_results() {
        assertArrayEquals(
                new float[] {2, 4},
                KERNELS.call(manager, "twice", array(1, 2)).head().toFloatArray());
        NDList both = KERNELS.call(manager, "both", array(1, 2), array(10, 20));
        assertArrayEquals(new float[] {2, 4}, both.get(0).toFloatArray());
        assertArrayEquals(new float[] {11, 22}, both.get(1).toFloatArray());
    }

    @Test
    void run_arrayOfTheCaller_filled() {
        NDArray y = array(1, 2);
        KERNELS.run("fill", y, 3.5);
        assertArrayEquals(new float[] {3.5f, 3.5f}, y.toFloatArray());
    }

    @Test
    void callDouble_everyTypeOfArgument_arrives() {
        double total =
                KERNELS.callDouble(
                        "describe",
                        1,
                        0.25,
                        true,
                        "four",
                        new long[] {10, 20},
                        List.of(array(1, 2, 3), array(4)));
        assertEquals(1 + 0.25 + 1000 + 4 + 30 + 4, total);
        assertEquals(
                2 + 0.5,
                KERNELS.callDouble("describe", 2L, 0.5f, false, "", new long[0], List.of()));
    }

    @Test
    void callBoolean_arrays_answer() {
        assertTrue(KERNELS.callBoolean("positive", array(1, 2)));
        assertFalse(KERNELS.callBoolean("positive", array(1, -2)));
    }

    @Test
    void run_argumentOfAnotherKind_clearError() {
        IllegalArgumentException none =
                assertThrows(
                        IllegalArgumentException.class,
                        () -> KERNELS.run("twice", new Object[] {null}));
        assertTrue(none.getMessage().contains("null"), none.getMessage());
        IllegalArgumentException date =
                assertThrows(
                        IllegalArgumentException.class,
                        () -> KERNELS.run("twice", java.time.LocalDate.EPOCH));
        assertTrue(date.getMessage().contains("java.time.LocalDate"), date.getMessage());
        IllegalArgumentException list =
                assertThrows(
                        IllegalArgumentException.class,
                        () ->
                                KERNELS.callDouble(
                                        "describe", 1, 1.0, true, "", List.of(1, 2), List.of()));
        assertTrue(list.getMessage().contains("java.lang.Integer"), list.getMessage());
    }

    @Test
    void run_failingKernel_exceptionNamesKernelTextAndCause() {
        NDArray a = manager.zeros(new Shape(2, 3));
        KernelException e =
                assertThrows(KernelException.class, () -> KERNELS.call(manager, "product", a, a));
        assertTrue(e.getMessage().contains("product of sample failed"), e.getMessage());
        assertTrue(e.getMessage().contains("cannot be multiplied"), e.getMessage());
    }

    @Test
    void run_unknownMethodOrWrongArguments_exceptionNamesThem() {
        KernelException unknown =
                assertThrows(KernelException.class, () -> KERNELS.run("absent", array(1)));
        assertTrue(unknown.getMessage().contains("absent"), unknown.getMessage());
        KernelException count =
                assertThrows(KernelException.class, () -> KERNELS.run("fill", array(1)));
        assertTrue(count.getMessage().contains("fill"), count.getMessage());
    }

    @Test
    void call_resultIsNoArray_exceptionNamesTheKernel() {
        KernelException e =
                assertThrows(
                        KernelException.class, () -> KERNELS.call(manager, "fill", array(1), 1.0));
        assertTrue(e.getMessage().contains("fill"), e.getMessage());
    }

    @Test
    void record_namedArguments_namesAsBeforeAndGradientsFlow() {
        NDArray x = array(1, 2);
        NDArray w = array(10, 20);
        NDArray y = array(3, 4);
        x.setName("layer.weight");
        w.setName("module_method:twice");
        x.setRequiresGradient(true);
        w.setRequiresGradient(true);
        try (GradientCollector collector = Engine.getEngine("PyTorch").newGradientCollector()) {
            NDArray z = KERNELS.record(manager, "weighted", x, List.of(w, w), y).head();
            assertArrayEquals(new float[] {3 + 20, 8 + 40}, z.toFloatArray());
            collector.backward(z.sum());
        }
        assertEquals("layer.weight", x.getName());
        assertEquals("module_method:twice", w.getName());
        assertEquals(null, y.getName());
        assertArrayEquals(new float[] {3, 4}, x.getGradient().toFloatArray());
        assertArrayEquals(new float[] {2, 2}, w.getGradient().toFloatArray());
    }

    @Test
    void record_failingKernel_namesAsBefore() {
        NDArray a = manager.zeros(new Shape(2, 3));
        a.setName("weight");
        KernelException e =
                assertThrows(KernelException.class, () -> KERNELS.record(manager, "product", a, a));
        assertTrue(e.getMessage().contains("product of sample failed"), e.getMessage());
        assertEquals("weight", a.getName());
    }

    @Test
    void record_resultsManager_owner() {
        NDArray x = array(1, 2);
        try (NDManager batch = manager.newSubManager()) {
            NDArray y = KERNELS.record(batch, "twice", x).head();
            assertSame(batch, y.getManager());
            assertEquals(1, batch.getManagedArrays().size());
        }
        assertArrayEquals(new float[] {1, 2}, x.toFloatArray());
    }

    @Test
    void nothing_manyCalls_sharedAndEmpty() {
        assertSame(TorchKernels.nothing(), TorchKernels.nothing());
        assertEquals(0, TorchKernels.nothing().size());
    }

    @Test
    void everyWayToCall_twoThousandTimes_memoryStaysFlat() {
        Assumptions.assumeTrue(ProcessMemory.isKnown(), "resident memory is read from /proc");
        NDArray x = manager.ones(new Shape(32 * 1024)); // 128 KiB: 256 MiB if every call kept one
        NDArray w = manager.ones(x.getShape());
        long before = 0;
        for (int i = 0; i < 2100; i++) {
            if (i == 100) {
                before = ProcessMemory.nativeBytes();
            }
            try (NDManager batch = manager.newSubManager()) {
                KERNELS.run("fill", x, 1.0);
                KERNELS.call(batch, "both", x, w);
                KERNELS.callDouble("describe", 1, 1.0, true, "a", new long[] {1}, List.of(x, w));
                KERNELS.record(batch, "weighted", x, List.of(w, w), w);
                NDArray wrong = batch.ones(new Shape(3, 2));
                assertThrows(
                        KernelException.class, () -> KERNELS.call(batch, "product", wrong, wrong));
            }
        }
        long growth = ProcessMemory.nativeBytes() - before;
        assertTrue(growth < 16 << 20, "grew by " + (growth >> 20) + " MiB");
        assertEquals(2, manager.getManagedArrays().size());
    }

    @Test
    void everyWayToCall_eightThreadsOnTheSameArrays_rightResults() throws Exception {
        NDArray x = array(1, 2);
        NDArray w = array(10, 20);
        x.setName("shared.x");
        w.setName("shared.w");
        ExecutorService threads = Executors.newFixedThreadPool(8);
        try {
            List<Future<?>> done = new ArrayList<>();
            for (int t = 0; t < 8; t++) {
                float own = t;
                done.add(
                        threads.submit(
                                () -> {
                                    for (int i = 0; i < 200; i++) {
                                        check(x, w, own);
                                    }
                                }));
            }
            for (Future<?> future : done) {
                future.get();
            }
        } finally {
            threads.shutdownNow();
        }
        assertEquals("shared.x", x.getName());
        assertEquals("shared.w", w.getName());
    }

    private void check(NDArray x, NDArray w, float own) {
        try (NDManager batch = manager.newSubManager()) {
            NDArray y = batch.create(new float[] {own, own});
            float[] sum = KERNELS.call(batch, "both", x, y).get(1).toFloatArray();
            float[] weighted =
                    KERNELS.record(batch, "optional", y, TorchKernels.nothing(), List.of(w, x))
                            .head()
                            .toFloatArray();
            assertArrayEquals(new float[] {1 + own, 2 + own}, sum);
            assertArrayEquals(new float[] {11 + own, 22 + own}, weighted);
        }
    }
}
