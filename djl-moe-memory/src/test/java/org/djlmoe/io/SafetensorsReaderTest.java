package org.djlmoe.io;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.Arrays;
import java.util.List;
import java.util.NoSuchElementException;
import java.util.Random;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class SafetensorsReaderTest {

    private static final Path PYTHON = Path.of("src/test/resources/safetensors/python.safetensors");
    private static final String A =
            "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}";

    @TempDir Path folder;

    private Path write(long headerLength, byte[] header, int dataBytes) throws IOException {
        ByteBuffer bytes =
                ByteBuffer.allocate(8 + header.length + dataBytes).order(ByteOrder.LITTLE_ENDIAN);
        bytes.putLong(headerLength).put(header);
        return Files.write(folder.resolve("x.safetensors"), bytes.array());
    }

    private Path write(String header, int dataBytes) throws IOException {
        byte[] bytes = header.getBytes(StandardCharsets.UTF_8);
        return write(bytes.length, bytes, dataBytes);
    }

    /** The error must name the file and everything in {@code parts}. */
    private static void assertRefused(Path file, String... parts) {
        String message =
                assertThrows(SafetensorsException.class, () -> SafetensorsReader.open(file))
                        .getMessage();
        assertTrue(message.contains(file.toString()), message);
        for (String part : parts) {
            assertTrue(message.contains(part), message);
        }
    }

    private void assertRefused(String header, int dataBytes, String... parts) throws IOException {
        assertRefused(write(header, dataBytes), parts);
    }

    private static String tensor(String dtype, String shape, String offsets) {
        return "{\"a\":{\"dtype\":\""
                + dtype
                + "\",\"shape\":"
                + shape
                + ",\"data_offsets\":"
                + offsets
                + "}}";
    }

    @Test
    void open_fileShorterThanPrefix_refused() throws IOException {
        assertRefused(Files.write(folder.resolve("t.safetensors"), new byte[5]), "truncated");
    }

    @Test
    void open_emptyFile_refused() throws IOException {
        assertRefused(Files.write(folder.resolve("t.safetensors"), new byte[0]), "truncated");
    }

    @Test
    void open_headerLongerThanFile_refused() throws IOException {
        assertRefused(
                write(1000, "{}".getBytes(StandardCharsets.UTF_8), 0), "longer than the file");
    }

    @Test
    void open_hugeHeaderLength_refusedWithoutAllocating() throws IOException {
        assertRefused(write(Long.MAX_VALUE, new byte[2], 0), "9223372036854775807");
    }

    @Test
    void open_headerLengthWithTopBit_isUnsigned() throws IOException {
        assertRefused(write(-1, new byte[2], 0), "18446744073709551615");
    }

    @Test
    void open_dataCutOff_refused() throws IOException {
        assertRefused("{" + A + "}", 7, "'a'", "truncated");
    }

    @Test
    void open_offsetsBeyondData_refused() throws IOException {
        assertRefused(tensor("F32", "[2]", "[100,108]"), 8, "'a'", "out of range");
    }

    @Test
    void open_overlap_refused() throws IOException {
        assertRefused(
                "{" + A + ",\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}",
                12,
                "'b'",
                "overlaps",
                "'a'");
    }

    @Test
    void open_sameBytesTwice_refused() throws IOException {
        assertRefused("{" + A + "," + A.replace("\"a\"", "\"b\"") + "}", 8, "overlaps");
    }

    @Test
    void open_gap_refused() throws IOException {
        assertRefused(
                "{" + A + ",\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[12,16]}}",
                16,
                "'b'",
                "gap of 4");
    }

    @Test
    void open_gapAtBegin_refused() throws IOException {
        assertRefused(tensor("F32", "[1]", "[4,8]"), 8, "'a'", "gap");
    }

    @Test
    void open_surplusBytesAtEnd_refused() throws IOException {
        assertRefused("{" + A + "}", 9, "1 bytes at the end");
    }

    @Test
    void open_shapeDisagreesWithBytes_refused() throws IOException {
        assertRefused(tensor("F32", "[3]", "[0,8]"), 8, "'a'", "needs 12");
    }

    @Test
    void open_dtypeDisagreesWithBytes_refused() throws IOException {
        assertRefused(tensor("F64", "[2]", "[0,8]"), 8, "'a'", "needs 16");
    }

    @Test
    void open_endBeforeBegin_refused() throws IOException {
        assertRefused(tensor("F32", "[2]", "[8,0]"), 8, "'a'", "ends before it begins");
    }

    @Test
    void open_unknownDtype_refused() throws IOException {
        assertRefused(tensor("F31", "[2]", "[0,8]"), 8, "'a'", "unknown dtype 'F31'");
    }

    @Test
    void open_lowerCaseDtype_refused() throws IOException {
        assertRefused(tensor("f32", "[2]", "[0,8]"), 8, "unknown dtype 'f32'");
    }

    @Test
    void open_shapeOverflows_refused() throws IOException {
        assertRefused(
                tensor("F32", "[4294967296,4294967296]", "[0,0]"), 0, "'a'", "2^63 bytes or more");
    }

    @Test
    void open_negativeAxis_refused() throws IOException {
        assertRefused(tensor("F32", "[-2]", "[0,8]"), 8, "'a'", "negative");
    }

    @Test
    void open_negativeOffset_refused() throws IOException {
        assertRefused(tensor("F32", "[2]", "[-8,0]"), 8, "'a'", "negative");
    }

    @Test
    void open_numberBeyondLong_refused() throws IOException {
        assertRefused(tensor("F32", "[2]", "[0,9223372036854775808]"), 8, "'a'", "2^63");
    }

    @Test
    void open_fractionalNumber_refused() throws IOException {
        assertRefused(tensor("F32", "[2.0]", "[0,8]"), 8, "'a'", "2.0");
    }

    @Test
    void open_exponentNumber_refused() throws IOException {
        assertRefused(tensor("F32", "[2e0]", "[0,8]"), 8, "'a'", "2e0");
    }

    @Test
    void open_numberAsString_refused() throws IOException {
        assertRefused(tensor("F32", "[\"2\"]", "[0,8]"), 8, "'a'", "other than a number");
    }

    @Test
    void open_threeOffsets_refused() throws IOException {
        assertRefused(tensor("F32", "[2]", "[0,8,8]"), 8, "'a'", "3 data_offsets");
    }

    @Test
    void open_duplicateTensor_refused() throws IOException {
        assertRefused("{" + A + "," + A + "}", 8, "'a'", "twice");
    }

    @Test
    void open_duplicateKeyInTensor_refused() throws IOException {
        assertRefused(
                "{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
                8,
                "'a'",
                "'dtype' twice");
    }

    @Test
    void open_duplicateMetadata_refused() throws IOException {
        assertRefused(
                "{\"__metadata__\":{},\"__metadata__\":{}," + A + "}", 8, "__metadata__", "twice");
    }

    @Test
    void open_duplicateMetadataEntry_refused() throws IOException {
        assertRefused("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0, "'k'", "twice");
    }

    @Test
    void open_metadataNotString_refused() throws IOException {
        assertRefused("{\"__metadata__\":{\"k\":1}}", 0, "'k'", "not a string");
    }

    @Test
    void open_unknownKey_refused() throws IOException {
        assertRefused(
                "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1}}",
                8,
                "'a'",
                "unknown key 'x'");
    }

    @Test
    void open_missingKey_refused() throws IOException {
        assertRefused("{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "'a'", "lacks");
    }

    @Test
    void open_tensorNotObject_refused() throws IOException {
        assertRefused("{\"a\":7}", 8, "'a'", "object");
    }

    @Test
    void open_dtypeNull_refused() throws IOException {
        assertRefused(tensor("F32", "[2]", "[0,8]").replace("\"F32\"", "null"), 8, "'a'", "dtype");
    }

    @Test
    void open_notJson_refused() throws IOException {
        assertRefused("not json", 0, "not valid JSON");
    }

    @Test
    void open_jsonArray_refused() throws IOException {
        assertRefused("[]", 0, "not valid JSON");
    }

    @Test
    void open_jsonCutOff_refused() throws IOException {
        assertRefused("{" + A, 8, "not valid JSON");
    }

    @Test
    void open_unquotedNames_refused() throws IOException {
        assertRefused("{" + A.replace("\"a\"", "a") + "}", 8, "not valid JSON");
    }

    @Test
    void open_textAfterJson_refused() throws IOException {
        assertRefused("{" + A + "} {}", 8, "not valid JSON");
    }

    @Test
    void open_emptyHeader_refused() throws IOException {
        assertRefused("", 0, "not valid JSON");
    }

    @Test
    void open_invalidUtf8_refused() throws IOException {
        assertRefused(write(2, new byte[] {(byte) 0xff, (byte) 0xfe}, 0), "UTF-8");
    }

    @Test
    void open_deepNesting_refused() throws IOException {
        assertRefused("{\"a\":" + "[".repeat(100_000) + "]".repeat(100_000) + "}", 0, "'a'");
    }

    @Test
    void open_paddedHeader_accepted() throws IOException {
        try (SafetensorsReader reader = SafetensorsReader.open(write("{" + A + "}   ", 8))) {
            assertEquals(List.of("a"), List.copyOf(reader.names()));
        }
    }

    @Test
    void open_noTensors_accepted() throws IOException {
        try (SafetensorsReader reader = SafetensorsReader.open(write("{}", 0))) {
            assertTrue(reader.names().isEmpty() && reader.metadata().isEmpty());
        }
    }

    @Test
    void open_refusedFile_canBeDeletedAndReplaced() throws IOException {
        Path file = write("{}", 1);
        assertRefused(file, "1 bytes");
        Files.delete(file);
    }

    @Test
    void readF32_fileByPython_givesItsValues() throws IOException {
        try (SafetensorsReader reader = SafetensorsReader.open(PYTHON)) {
            assertEquals("ü", reader.metadata().get("note"));
            for (String name : List.of("f16", "bf16", "f16.special", "bf16.special", "f64")) {
                float[] expected = read(reader, name + ".expected");
                assertArrayEquals(expected, read(reader, name), name);
                assertTrue(expected.length >= 7, name);
            }
            assertArrayEquals(
                    new float[] {
                        0f,
                        -0f,
                        Float.POSITIVE_INFINITY,
                        Float.NEGATIVE_INFINITY,
                        1e-7f,
                        65504f,
                        1e-40f
                    },
                    read(reader, "f32.special"));
            assertArrayEquals(new float[] {2.5f}, read(reader, "scalar"));
            assertEquals(0, reader.info("scalar").shape().length);
            assertArrayEquals(new long[] {0, 3}, reader.info("empty").shape());
            assertEquals(0, read(reader, "empty").length);
            assertEquals(DType.BOOL, reader.info("bool").dtype());
        }
    }

    @Test
    void readBytes_integersByPython_givesTheirBytes() throws IOException {
        try (SafetensorsReader reader = SafetensorsReader.open(PYTHON)) {
            ByteBuffer longs = ByteBuffer.allocate(16).order(ByteOrder.LITTLE_ENDIAN);
            reader.readBytes("i64", 32, longs);
            assertEquals(4, longs.getLong(0));
            assertEquals(5, longs.getLong(8));
        }
    }

    @Test
    void readF32_integers_refused() throws IOException {
        try (SafetensorsReader reader = SafetensorsReader.open(PYTHON)) {
            String message =
                    assertThrows(
                                    IllegalArgumentException.class,
                                    () -> reader.readF32("i64", 0, FloatBuffer.allocate(1)))
                            .getMessage();
            assertTrue(message.contains("i64") && message.contains("I64"), message);
        }
    }

    @Test
    void readF32_beyondTensor_refused() throws IOException {
        try (SafetensorsReader reader = SafetensorsReader.open(PYTHON)) {
            FloatBuffer two = FloatBuffer.allocate(2);
            assertThrows(IllegalArgumentException.class, () -> reader.readF32("scalar", 0, two));
            assertThrows(IllegalArgumentException.class, () -> reader.readF32("f32", -1, two));
            assertThrows(IllegalArgumentException.class, () -> reader.readF32("f32", 34, two));
            assertEquals(0, two.position());
        }
    }

    @Test
    void info_unknownTensor_namesFileAndTensor() throws IOException {
        try (SafetensorsReader reader = SafetensorsReader.open(PYTHON)) {
            String message =
                    assertThrows(NoSuchElementException.class, () -> reader.info("nope"))
                            .getMessage();
            assertTrue(message.contains("python.safetensors") && message.contains("nope"), message);
        }
    }

    /** More than one scratch buffer, cut at odd places, for every type. */
    @Test
    void readF32_manyPieces_equalsOneRead() throws IOException {
        int size = 200_003;
        Random random = new Random(7);
        for (DType dtype : List.of(DType.F32, DType.F16, DType.BF16)) {
            Path file = folder.resolve(dtype + ".safetensors");
            FloatBuffer values = FloatBuffer.allocate(size);
            while (values.hasRemaining()) {
                values.put(HalfFloats.bf16ToFloat((short) random.nextInt(0x3f00, 0x4100)));
            }
            try (SafetensorsWriter writer =
                    SafetensorsWriter.builder().addTensor("w", dtype, size).build(file)) {
                writer.writeF32("w", values.flip());
                writer.commit();
            }
            try (SafetensorsReader reader = SafetensorsReader.open(file)) {
                float[] pieces = new float[size];
                for (int at = 0; at < size; ) {
                    int count = Math.min(random.nextInt(1, 150_000), size - at);
                    reader.readF32("w", at, FloatBuffer.wrap(pieces, at, count));
                    at += count;
                }
                assertArrayEquals(values.array(), pieces, dtype.name());
            }
        }
    }

    /** A sparse file: offsets beyond 2^31 bytes without writing gigabytes. */
    @Test
    void readF32_tensorBeyond2GB_readsItsEnd() throws IOException {
        long elements = 800_000_000L;
        String header = tensor("F32", "[" + elements + "]", "[0," + elements * 4 + "]");
        Path file = write(header, 0);
        try (FileChannel channel = FileChannel.open(file, StandardOpenOption.WRITE)) {
            ByteBuffer last = ByteBuffer.allocate(4).order(ByteOrder.LITTLE_ENDIAN);
            channel.write(last.putFloat(0, 42f), 8 + header.length() + (elements - 1) * 4);
        }
        try (SafetensorsReader reader = SafetensorsReader.open(file)) {
            FloatBuffer two = FloatBuffer.allocate(2);
            reader.readF32("a", elements - 2, two);
            assertEquals("[0.0, 42.0]", Arrays.toString(two.array()));
        }
    }

    private static float[] read(SafetensorsReader reader, String name) throws IOException {
        FloatBuffer values = FloatBuffer.allocate((int) reader.info(name).elements());
        reader.readF32(name, 0, values);
        return values.array();
    }
}
