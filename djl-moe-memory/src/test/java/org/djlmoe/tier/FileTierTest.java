package org.djlmoe.tier;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.stream.Stream;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Assumptions;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledOnOs;
import org.junit.jupiter.api.condition.OS;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

class FileTierTest {

    @TempDir Path directory;
    private NDManager manager;

    @BeforeEach
    void open() {
        manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
    }

    @AfterEach
    void close() {
        manager.close();
    }

    private static long count(Path folder) throws IOException {
        try (Stream<Path> files = Files.list(folder)) {
            return files.count();
        }
    }

    /** In one piece, in several, and in pieces that are no multiple of an element. */
    @ParameterizedTest
    @ValueSource(longs = {1 << 30, 1024, 100, 7})
    void read_whatWasWritten_sameBitsOfEveryType(long pieceBytes) throws IOException {
        try (FileTier tier = new FileTier(directory, pieceBytes);
                SlotTier.Slot slot = tier.newSlot(tier.sizeOf(8 * 3 * 500))) {
            for (DataType type :
                    new DataType[] {DataType.FLOAT64, DataType.FLOAT32, DataType.INT64}) {
                NDArray source =
                        manager.randomUniform(-1e6f, 1e6f, new Shape(3, 500)).toType(type, true);
                NDArray target = manager.create(source.getShape(), type);
                slot.write(source);
                slot.read(target);
                assertArrayEquals(source.toByteArray(), target.toByteArray());
            }
            int managed = manager.getManagedArrays().size();
            NDArray source = manager.randomNormal(new Shape(3, 500));
            slot.write(source);
            source.close();
            assertEquals(managed, manager.getManagedArrays().size());
        }
    }

    @Test
    void write_arrayWithStrides_itsValuesAreWritten() {
        try (FileTier tier = new FileTier(directory);
                SlotTier.Slot slot = tier.newSlot(4096)) {
            NDArray source = manager.arange(12f).reshape(3, 4).transpose();
            NDArray target = manager.create(source.getShape());
            slot.write(source);
            slot.read(target);
            assertArrayEquals(source.toFloatArray(), target.toFloatArray());
        }
    }

    @Test
    void write_arrayLargerThanTheSlot_refused() {
        try (FileTier tier = new FileTier(directory);
                SlotTier.Slot slot = tier.newSlot(4096)) {
            NDArray large = manager.zeros(new Shape(1025));
            assertThrows(IllegalArgumentException.class, () -> slot.write(large));
        }
    }

    @Test
    void read_slotThatWasNotWritten_clearError() {
        try (FileTier tier = new FileTier(directory);
                SlotTier.Slot slot = tier.newSlot(4096)) {
            NDArray target = manager.zeros(new Shape(10));
            UncheckedIOException e =
                    assertThrows(UncheckedIOException.class, () -> slot.read(target));
            assertTrue(e.getMessage().contains(directory.toString()), e.getMessage());
        }
    }

    @Test
    @EnabledOnOs({OS.LINUX, OS.MAC})
    void newSlot_fileIsInUse_hasNoNameThatCouldBeLeftBehind() throws IOException {
        FileTier tier = new FileTier(directory);
        assertEquals(0, count(directory));
        SlotTier.Slot slot = tier.newSlot(4096);
        slot.write(manager.ones(new Shape(1024)));
        assertEquals(0, count(directory));
        assertEquals(1, tier.files());
        tier.close();
        assertEquals(0, tier.files());
        assertEquals(0, count(directory));
    }

    @Test
    void write_threadIsInterrupted_clearErrorAndNothingLeft() throws IOException {
        try (FileTier tier = new FileTier(directory)) {
            SlotTier.Slot slot = tier.newSlot(4096);
            NDArray source = manager.ones(new Shape(1024));
            Thread.currentThread().interrupt();
            UncheckedIOException e =
                    assertThrows(UncheckedIOException.class, () -> slot.write(source));
            assertTrue(Thread.interrupted());
            assertTrue(e.getMessage().contains(directory.toString()), e.getMessage());
        }
        assertEquals(0, count(directory));
    }

    @Test
    void newTier_directoryIsMissingOrAFile_namesIt() throws IOException {
        Path missing = directory.resolve("missing");
        assertTrue(refusal(missing).contains(missing.toString()));
        Path file = Files.createFile(directory.resolve("file"));
        assertTrue(refusal(file).contains("existing directory"));
        assertFalse(Files.exists(missing));
    }

    @Test
    @EnabledOnOs(OS.LINUX)
    void newTier_directoryIsNotWritable_saysSo() {
        // nobody can make files there, not even root
        assertTrue(refusal(Path.of("/proc")).contains("cannot write to /proc"));
    }

    @Test
    void newTier_fileSystemInMemory_refusedWithTheSettingThatHelps() throws IOException {
        for (String type : new String[] {"tmpfs", "ramfs", "TMPFS"}) {
            IllegalArgumentException e =
                    assertThrows(
                            IllegalArgumentException.class,
                            () -> FileTier.requireDisk(directory, type));
            assertTrue(e.getMessage().contains("optFileTier"), e.getMessage());
        }
        FileTier.requireDisk(directory, "ext4");
        Path shm = Path.of("/dev/shm");
        Assumptions.assumeTrue(
                Files.isDirectory(shm) && Files.getFileStore(shm).type().equals("tmpfs"));
        assertTrue(refusal(shm).contains("lies in memory"));
    }

    @Test
    void available_realDisk_isPositive() {
        try (FileTier tier = new FileTier(directory)) {
            assertTrue(tier.available() > 0);
            assertEquals(4096, tier.sizeOf(1));
            assertEquals(4096, tier.sizeOf(4096));
            assertEquals(8192, tier.sizeOf(4097));
        }
    }

    private static String refusal(Path path) {
        return assertThrows(IllegalArgumentException.class, () -> new FileTier(path)).getMessage();
    }
}
