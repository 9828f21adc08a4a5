package org.djlmoe.tier;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.stream.Stream;
import org.djlmoe.kernel.TorchKernels;
import org.djlmoe.reference.ProcessMemory;
import org.junit.jupiter.api.Assumptions;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledOnOs;
import org.junit.jupiter.api.condition.OS;
import org.junit.jupiter.api.io.TempDir;

class MappedFileTierTest {

    private static final TorchKernels KERNELS =
            TorchKernels.compile(
                    "fill",
                    "def fill(self, x: Tensor) -> int:\n"
                            + "    x.copy_(torch.arange(x.numel(), dtype=6))\n"
                            + "    return 0\n"
                            + "def ones(self, x: Tensor) -> int:\n"
                            + "    x.fill_(1.0)\n"
                            + "    return 0\n");

    @TempDir Path directory;

    private long files() throws IOException {
        try (Stream<Path> files = Files.list(directory)) {
            return files.count();
        }
    }

    @Test
    void allocate_severalNames_givesZerosAndCountsBytes() {
        try (MappedFileTier tier = new MappedFileTier(directory)) {
            NDArray a = tier.allocate("a", 3);
            NDArray b = tier.allocate("b", 5000);
            assertArrayEquals(new float[3], a.toFloatArray());
            assertArrayEquals(new float[5000], b.toFloatArray());
            assertEquals(4 * 5003, tier.bytes());
            tier.free("a");
            tier.free("nobody");
            assertEquals(4 * 5000, tier.bytes());
            assertThrows(IllegalArgumentException.class, () -> tier.allocate("b", 1));
        }
    }

    @Test
    @EnabledOnOs(OS.LINUX)
    void allocate_untilClose_noFileHasAName() throws IOException {
        MappedFileTier tier = new MappedFileTier(directory);
        NDArray a = tier.allocate("a", 1000);
        assertEquals(0, files());
        tier.close();
        tier.close();
        assertEquals(0, files());
        assertEquals(0, tier.bytes());
        assertThrows(IllegalStateException.class, a::toFloatArray);
        assertTrue(
                assertThrows(IllegalStateException.class, () -> tier.allocate("b", 1))
                        .getMessage()
                        .contains("closed"));
    }

    @Test
    @EnabledOnOs(OS.LINUX)
    void drop_valuesWritten_memoryFallsAndTheyComeBack() throws IOException {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                MappedFileTier tier = new MappedFileTier(directory)) {
            int n = 3_000_001;
            NDArray a = tier.allocate("a", n);
            KERNELS.run("fill", a);
            Assumptions.assumeTrue(tier.drop(), "this system keeps the pages");
            assertFalse(tier.isInMemory("a"));
            NDArray copy = manager.zeros(new Shape(n + 10));
            tier.read("a", copy);
            assertEquals(12345f, copy.getFloat(12345));
            assertEquals(0f, copy.getFloat(n));
            tier.readAhead("a");
            assertTrue(tier.isInMemory("a"));
            KERNELS.run("ones", a);
            tier.write("a", copy);
            assertEquals(12345f, a.getFloat(12345));
            assertTrue(tier.drop());
            float[] values = a.toFloatArray();
            assertEquals(n, values.length);
            assertEquals(12345f, values[12345]);
            assertEquals(n - 1f, values[n - 1]);
        }
    }

    @Test
    @EnabledOnOs(OS.LINUX)
    void allocate_manyBytes_areNoMemoryOfTheProcess() {
        Assumptions.assumeTrue(ProcessMemory.isKnown());
        try (MappedFileTier tier = new MappedFileTier(directory)) {
            KERNELS.run("ones", tier.allocate("first", 1000));
            long before = ProcessMemory.nativeBytes();
            KERNELS.run("ones", tier.allocate("a", 1 << 25));
            long grown = ProcessMemory.nativeBytes() - before;
            assertTrue(grown < 8 << 20, grown + " bytes for 128 MB");
        }
    }

    @Test
    void allocate_moreThanTheDiskHas_saysSoAndLeavesNothing() throws IOException {
        try (MappedFileTier tier = new MappedFileTier(directory)) {
            UncheckedIOException e =
                    assertThrows(
                            UncheckedIOException.class, () -> tier.allocate("state", 1L << 50));
            assertTrue(e.getMessage().contains("optFileTier"), e.getMessage());
            assertTrue(e.getMessage().contains("state"), e.getMessage());
            assertEquals(0, tier.bytes());
            assertEquals(0, files());
            assertEquals(7, tier.allocate("state", 7).size());
        }
    }

    @Test
    void allocate_folderGone_saysWhich() throws IOException {
        Path folder = Files.createDirectory(directory.resolve("gone"));
        try (MappedFileTier tier = new MappedFileTier(folder)) {
            Files.delete(folder);
            UncheckedIOException e =
                    assertThrows(UncheckedIOException.class, () -> tier.allocate("a", 7));
            assertTrue(e.getMessage().contains(folder.toString()), e.getMessage());
        }
    }

    @Test
    void create_missingFolderOrFile_isRefused() throws IOException {
        Path file = Files.createFile(directory.resolve("file"));
        for (Path bad : new Path[] {directory.resolve("none"), file}) {
            assertThrows(IllegalArgumentException.class, () -> new MappedFileTier(bad));
        }
    }

    @Test
    @EnabledOnOs(OS.LINUX)
    void create_inMemory_isRefusedWithTheSetting() {
        Path memory = Path.of("/dev/shm");
        Assumptions.assumeTrue(Files.isWritable(memory));
        IllegalArgumentException e =
                assertThrows(IllegalArgumentException.class, () -> new MappedFileTier(memory));
        assertTrue(e.getMessage().contains("optFileTier"), e.getMessage());
        assertTrue(e.getMessage().contains("OffloadStreamAdamW"), e.getMessage());
    }
}
