package org.djlmoe.io;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import java.util.stream.Stream;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class SafetensorsWriterTest {

    @TempDir Path folder;
    private Path file;

    @BeforeEach
    void name() {
        file = folder.resolve("w.safetensors");
    }

    private static FloatBuffer floats(float... values) {
        return FloatBuffer.wrap(values);
    }

    private List<String> files() throws IOException {
        try (Stream<Path> entries = Files.list(folder)) {
            return entries.map(p -> p.getFileName().toString()).sorted().toList();
        }
    }

    @Test
    void commit_mixedTypesInPieces_readsBack() throws IOException {
        try (SafetensorsWriter writer =
                SafetensorsWriter.builder()
                        .optMetadata(Map.of("format", "pt", "quote\"", "ü\n"))
                        .addTensor("empty", DType.F32, 0, 4)
                        .addTensor("a \"quoted\" ü", DType.F32, 2, 2)
                        .addTensor("half", DType.F16, 3)
                        .addTensor("brain", DType.BF16, 1)
                        .addTensor("ids", DType.I64)
                        .addTensor("none", DType.BF16, 0)
                        .build(file)) {
            writer.writeF32("a \"quoted\" ü", floats(1, 2, 3));
            writer.writeF32("a \"quoted\" ü", floats(4));
            // 1 + 2^-11 is a tie between 1 and the next half.
            writer.writeF32("half", floats(1 + 0x1p-11f, 1e6f, Float.NaN));
            writer.writeF32("brain", floats(1 + 0x1p-8f));
            ByteBuffer id = ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN);
            writer.writeBytes("ids", id.putLong(0, 77));
            writer.commit();
        }
        assertEquals(List.of("w.safetensors"), files());
        try (SafetensorsReader reader = SafetensorsReader.open(file)) {
            assertEquals(Map.of("format", "pt", "quote\"", "ü\n"), reader.metadata());
            FloatBuffer a = FloatBuffer.allocate(4);
            reader.readF32("a \"quoted\" ü", 0, a);
            assertArrayEquals(new float[] {1, 2, 3, 4}, a.array());
            FloatBuffer half = FloatBuffer.allocate(3);
            reader.readF32("half", 0, half);
            assertArrayEquals(new float[] {1, Float.POSITIVE_INFINITY, Float.NaN}, half.array());
            FloatBuffer brain = FloatBuffer.allocate(1);
            reader.readF32("brain", 0, brain);
            assertEquals(1, brain.get(0));
            ByteBuffer id = ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN);
            reader.readBytes("ids", 0, id);
            assertEquals(77, id.getLong(0));
            assertEquals(0, reader.info("ids").shape().length);
        }
    }

    @Test
    void build_anyPlan_alignsDataTo8Bytes() throws IOException {
        for (int length = 1; length < 10; length++) {
            try (SafetensorsWriter writer =
                    SafetensorsWriter.builder()
                            .addTensor("n".repeat(length), DType.F32, 1)
                            .build(file)) {
                writer.writeF32("n".repeat(length), floats(1));
                writer.commit();
            }
            ByteBuffer bytes = ByteBuffer.wrap(Files.readAllBytes(file));
            assertEquals(0, bytes.order(ByteOrder.LITTLE_ENDIAN).getLong(0) % 8);
        }
    }

    @Test
    void close_withoutCommit_leavesNoFile() throws IOException {
        try (SafetensorsWriter writer =
                SafetensorsWriter.builder().addTensor("a", DType.F32, 1).build(file)) {
            writer.writeF32("a", floats(1));
            assertFalse(Files.exists(file), "nothing under the final name before the commit");
        }
        assertEquals(List.of(), files());
    }

    @Test
    void close_withoutCommit_keepsOlderFile() throws IOException {
        Files.writeString(file, "old");
        try (SafetensorsWriter writer =
                SafetensorsWriter.builder().addTensor("a", DType.F32, 1).build(file)) {
            writer.writeF32("a", floats(1));
        }
        assertEquals("old", Files.readString(file));
        assertEquals(List.of("w.safetensors"), files());
    }

    @Test
    void commit_incomplete_refusedAndLeavesNoFile() throws IOException {
        try (SafetensorsWriter writer =
                SafetensorsWriter.builder().addTensor("a", DType.F32, 2).build(file)) {
            writer.writeF32("a", floats(1));
            String message = assertThrows(IllegalStateException.class, writer::commit).getMessage();
            assertTrue(message.contains("'a'") && message.contains("4 of 8"), message);
        }
        assertEquals(List.of(), files());
    }

    @Test
    void writeF32_outOfTurn_refused() throws IOException {
        try (SafetensorsWriter writer =
                SafetensorsWriter.builder()
                        .addTensor("a", DType.F32, 1)
                        .addTensor("b", DType.F32, 1)
                        .build(file)) {
            String message =
                    assertThrows(IllegalStateException.class, () -> writer.writeF32("b", floats(1)))
                            .getMessage();
            assertTrue(message.contains("'b'") && message.contains("'a'"), message);
        }
    }

    @Test
    void writeF32_tooLong_refusedBeforeAnythingIsWritten() throws IOException {
        try (SafetensorsWriter writer =
                SafetensorsWriter.builder().addTensor("a", DType.BF16, 1).build(file)) {
            assertThrows(IllegalArgumentException.class, () -> writer.writeF32("a", floats(1, 2)));
            writer.writeF32("a", floats(3));
            assertThrows(IllegalStateException.class, () -> writer.writeF32("a", floats(1)));
            writer.commit();
        }
        try (SafetensorsReader reader = SafetensorsReader.open(file)) {
            FloatBuffer a = FloatBuffer.allocate(1);
            reader.readF32("a", 0, a);
            assertEquals(3, a.get(0));
        }
    }

    @Test
    void writeF32_toIntegers_refused() throws IOException {
        try (SafetensorsWriter writer =
                SafetensorsWriter.builder().addTensor("a", DType.I32, 1).build(file)) {
            assertThrows(IllegalArgumentException.class, () -> writer.writeF32("a", floats(1)));
        }
    }

    @Test
    void writeF32_afterCommit_refused() throws IOException {
        try (SafetensorsWriter writer = SafetensorsWriter.builder().build(file)) {
            writer.commit();
            assertThrows(IllegalStateException.class, () -> writer.writeF32("a", floats(1)));
        }
    }

    @Test
    void writeBytes_partOfBuffer_writesOnlyThatPart() throws IOException {
        try (SafetensorsWriter writer =
                SafetensorsWriter.builder().addTensor("a", DType.U8, 2).build(file)) {
            writer.writeBytes("a", ByteBuffer.wrap(new byte[] {9, 1, 2, 9}, 1, 2));
            writer.commit();
        }
        try (SafetensorsReader reader = SafetensorsReader.open(file)) {
            ByteBuffer a = ByteBuffer.allocate(2);
            reader.readBytes("a", 0, a);
            assertArrayEquals(new byte[] {1, 2}, a.array());
        }
    }

    @Test
    void addTensor_badPlans_refused() {
        SafetensorsWriter.Builder builder =
                SafetensorsWriter.builder().addTensor("a", DType.F32, 1);
        assertThrows(IllegalArgumentException.class, () -> builder.addTensor("a", DType.F32, 1));
        assertThrows(IllegalArgumentException.class, () -> builder.addTensor("b", DType.F32, -1));
        assertThrows(
                IllegalArgumentException.class,
                () -> builder.addTensor("__metadata__", DType.F32, 1));
        assertThrows(
                IllegalArgumentException.class,
                () -> builder.addTensor("c", DType.F32, Long.MAX_VALUE, 2));
        assertEquals(1, builder.tensors().size());
    }
}
