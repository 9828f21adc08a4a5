package org.djlmoe.io;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.FloatBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Set;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** Shards, written and read. */
class SafetensorsFolderTest {

    @TempDir Path folder;

    /** Tensors t0, t1, ... of two floats (8 bytes) each, with their number as value. */
    private void write(int tensors, long maxShardBytes) throws IOException {
        ShardedSafetensorsWriter.Builder builder =
                ShardedSafetensorsWriter.builder()
                        .setFolder(folder)
                        .optMaxShardBytes(maxShardBytes);
        for (int i = 0; i < tensors; i++) {
            builder.addTensor("t" + i, DType.F32, 2);
        }
        try (ShardedSafetensorsWriter writer = builder.build()) {
            for (int i = 0; i < tensors; i++) {
                writer.writeF32("t" + i, FloatBuffer.wrap(new float[] {i, i}));
            }
            writer.commit();
        }
    }

    private List<String> files() throws IOException {
        try (Stream<Path> entries = Files.list(folder)) {
            return entries.map(p -> p.getFileName().toString()).sorted().toList();
        }
    }

    private void edit(String name, String from, String to) throws IOException {
        Path path = folder.resolve(name);
        String text = Files.readString(path);
        assertTrue(text.contains(from), text);
        Files.writeString(path, text.replace(from, to));
    }

    private void assertRefused(String... parts) {
        String message =
                assertThrows(SafetensorsException.class, () -> SafetensorsFolder.open(folder))
                        .getMessage();
        for (String part : parts) {
            assertTrue(message.contains(part), message);
        }
    }

    @Test
    void commit_fitsIntoOneFile_writesNoIndex() throws IOException {
        write(3, 24);
        assertEquals(List.of("model.safetensors"), files());
    }

    @Test
    void commit_moreThanOneFile_writesShardsAndIndex() throws IOException {
        write(5, 16);
        assertEquals(
                List.of(
                        "model-00001-of-00003.safetensors",
                        "model-00002-of-00003.safetensors",
                        "model-00003-of-00003.safetensors",
                        "model.safetensors.index.json"),
                files());
        try (SafetensorsFolder source = SafetensorsFolder.open(folder)) {
            assertEquals(Set.of("t0", "t1", "t2", "t3", "t4"), source.names());
            for (int i = 0; i < 5; i++) {
                FloatBuffer value = FloatBuffer.allocate(1);
                source.readF32("t" + i, 1, value);
                assertEquals(i, value.get(0));
            }
            assertTrue(source.reader("t4").file().endsWith("model-00003-of-00003.safetensors"));
        }
        String index = Files.readString(folder.resolve("model.safetensors.index.json"));
        assertTrue(index.contains("\"total_size\": 40"), index);
    }

    @Test
    void commit_tensorLargerThanShard_getsItsOwn() throws IOException {
        write(2, 1);
        assertEquals(3, files().size());
        SafetensorsFolder.open(folder).close();
    }

    @Test
    void commit_noTensors_writesEmptyFile() throws IOException {
        write(0, 1);
        try (SafetensorsFolder source = SafetensorsFolder.open(folder)) {
            assertTrue(source.names().isEmpty());
        }
    }

    /** Leftovers would make the folder ambiguous or fill the disk. */
    @Test
    void commit_overOtherSharding_removesOldWeights() throws IOException {
        Files.writeString(folder.resolve("tokenizer.json"), "{}");
        write(5, 16);
        write(2, 8);
        assertEquals(4, files().size());
        write(2, 100);
        assertEquals(List.of("model.safetensors", "tokenizer.json"), files());
        write(2, 8);
        assertEquals(
                List.of(
                        "model-00001-of-00002.safetensors",
                        "model-00002-of-00002.safetensors",
                        "model.safetensors.index.json",
                        "tokenizer.json"),
                files());
        SafetensorsFolder.open(folder).close();
    }

    @Test
    void close_withoutCommit_leavesFolderAsItWas() throws IOException {
        write(2, 8);
        List<String> before = files();
        try (ShardedSafetensorsWriter writer =
                ShardedSafetensorsWriter.builder()
                        .setFolder(folder)
                        .optMaxShardBytes(8)
                        .addTensor("a", DType.F32, 2)
                        .addTensor("b", DType.F32, 2)
                        .build()) {
            writer.writeF32("a", FloatBuffer.allocate(2));
            writer.writeF32("b", FloatBuffer.allocate(1));
            assertThrows(IllegalStateException.class, writer::commit);
        }
        assertEquals(before, files());
        try (SafetensorsFolder source = SafetensorsFolder.open(folder)) {
            assertEquals(Set.of("t0", "t1"), source.names());
        }
    }

    @Test
    void writeF32_skippingATensor_refused() throws IOException {
        try (ShardedSafetensorsWriter writer =
                ShardedSafetensorsWriter.builder()
                        .setFolder(folder)
                        .optMaxShardBytes(4)
                        .addTensor("a", DType.F32, 1)
                        .addTensor("b", DType.F32, 1)
                        .build()) {
            assertThrows(
                    IllegalStateException.class,
                    () -> writer.writeF32("b", FloatBuffer.allocate(1)));
            assertThrows(
                    IllegalStateException.class,
                    () -> writer.writeF32("c", FloatBuffer.allocate(1)));
        }
        assertEquals(List.of(), files());
    }

    @Test
    void open_emptyFolder_refused() {
        assertRefused(folder.toString(), "neither");
    }

    @Test
    void open_singleFileAndIndex_refused() throws IOException {
        write(2, 8);
        Files.copy(
                folder.resolve("model-00001-of-00002.safetensors"),
                folder.resolve("model.safetensors"));
        assertRefused("both");
    }

    @Test
    void open_shardMissing_namesShardAndTensor() throws IOException {
        write(2, 8);
        Files.delete(folder.resolve("model-00002-of-00002.safetensors"));
        assertRefused("model-00002-of-00002.safetensors", "missing", "'t1'");
    }

    @Test
    void open_indexIsNoText_refused() throws IOException {
        write(2, 8);
        Files.write(
                folder.resolve("model.safetensors.index.json"), new byte[] {'{', '"', (byte) 0xff});
        assertRefused("model.safetensors.index.json", "is not a valid index");
    }

    @Test
    void open_indexNamesTensorThatShardLacks_refused() throws IOException {
        write(2, 8);
        edit("model.safetensors.index.json", "\"t1\"", "\"other\"");
        assertRefused("model-00002-of-00002.safetensors", "lacks tensor 'other'");
    }

    @Test
    void open_shardHasTensorThatIndexLacks_refused() throws IOException {
        write(3, 16);
        edit("model.safetensors.index.json", "\"t1\": \"model-00001-of-00002.safetensors\",", "");
        assertRefused("model-00001-of-00002.safetensors", "holds tensor 't1'");
    }

    @Test
    void open_tensorInTwoShards_refused() throws IOException {
        write(3, 16);
        Files.copy(
                folder.resolve("model-00001-of-00002.safetensors"),
                folder.resolve("model-00009-of-00009.safetensors"));
        edit(
                "model.safetensors.index.json",
                "\"t1\": \"model-00001-of-00002",
                "\"t1\": \"model-00009-of-00009");
        assertRefused("does not place here");
    }

    @Test
    void open_damagedShard_refused() throws IOException {
        write(2, 8);
        Path shard = folder.resolve("model-00002-of-00002.safetensors");
        byte[] bytes = Files.readAllBytes(shard);
        Files.write(shard, java.util.Arrays.copyOf(bytes, bytes.length - 1));
        assertRefused("model-00002-of-00002.safetensors", "'t1'", "truncated");
    }

    @Test
    void open_shardOutsideFolder_refused() throws IOException {
        write(2, 8);
        for (String path : List.of("../x", "/x", "a/../b", "", "..", "a\\\\b")) {
            Files.writeString(
                    folder.resolve("model.safetensors.index.json"),
                    "{\"weight_map\": {\"t\": \"" + path + "\"}}");
            assertRefused("model.safetensors.index.json", "plain file name");
        }
    }

    @Test
    void open_badIndexes_refused() throws IOException {
        write(2, 8);
        Path index = folder.resolve("model.safetensors.index.json");
        Files.writeString(index, "{\"metadata\": {}}");
        assertRefused(index.toString(), "no weight_map");
        Files.writeString(index, "{\"weight_map\": ");
        assertRefused(index.toString(), "not a valid index");
        Files.writeString(index, "{\"weight_map\": []}");
        assertRefused(index.toString(), "not a valid index");
        Files.writeString(index, "{\"weight_map\": {\"t\": 1}}");
        assertRefused(index.toString(), "'t'");
        String shard = "\"t0\": \"model-00001-of-00002.safetensors\"";
        Files.writeString(index, "{\"weight_map\": {" + shard + "," + shard + "}}");
        assertRefused(index.toString(), "'t0'", "twice");
        Files.writeString(index, "{\"weight_map\": {}, \"weight_map\": {}}");
        assertRefused(index.toString(), "twice");
    }
}
