package org.djlmoe.cache;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.util.List;
import java.util.SplittableRandom;
import java.util.stream.IntStream;
import java.util.zip.GZIPOutputStream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

class TraceFileTest {

    @TempDir private Path directory;

    private static ExpertTrace random(int experts, int topK, int layers, int... requests) {
        ExpertTrace.Builder trace =
                ExpertTrace.builder().setNumExperts(experts).setTopK(topK).setNumLayers(layers);
        SplittableRandom random = new SplittableRandom(7);
        for (int tokens : requests) {
            trace.beginRequest();
            for (int l = 0; l < layers; l++) {
                for (int t = 0; t < tokens; t++) {
                    int first = random.nextInt(experts);
                    trace.append(
                            l,
                            IntStream.range(0, topK).map(i -> (first + i * i) % experts).toArray());
                }
            }
        }
        return trace.build();
    }

    private static void assertSame(ExpertTrace expected, ExpertTrace actual) {
        assertEquals(expected.toString(), actual.toString());
        assertEquals(expected.requests(), actual.requests());
        for (int l = 0; l < expected.numLayers(); l++) {
            for (int t = 0; t < expected.tokens(); t++) {
                for (int i = 0; i < expected.topK(); i++) {
                    assertEquals(expected.expert(l, t, i), actual.expert(l, t, i));
                }
            }
        }
    }

    @ParameterizedTest
    @ValueSource(strings = {"trace.json", "trace.json.gz", "TRACE.GZ"})
    void read_writtenFile_isTheSameTrace(String name) throws IOException {
        Path file = directory.resolve(name);
        // An empty request, and ids that a signed short would not hold.
        ExpertTrace trace = random(65536, 3, 2, 40, 0, 700);
        trace.write(file);
        assertSame(trace, ExpertTrace.read(file));
        boolean packed = Files.readAllBytes(file)[0] == 0x1f;
        assertEquals(!name.equals("trace.json"), packed);
        try (var files = Files.list(directory)) {
            assertEquals(List.of(file), files.toList());
        }
    }

    /** The words of the Javadoc, byte for byte: other programs read them. */
    @Test
    void write_smallTrace_isTheDocumentedText() throws IOException {
        Path file = directory.resolve("t.json");
        ExpertTrace.builder()
                .setNumExperts(8)
                .setTopK(2)
                .setNumLayers(2)
                .beginRequest()
                .append(0, 5, 0, 5, 3)
                .append(1, 1, 2, 7, 1)
                .beginRequest()
                .append(0, 0, 6)
                .append(1, 2, 4)
                .build()
                .write(file);
        assertEquals(
                "{\"experts\":8,\"top_k\":2,\"requests\":[{\"layers\":[[5,0,5,3],[1,2,7,1]]},"
                        + "{\"layers\":[[0,6],[2,4]]}]}",
                Files.readString(file));
    }

    /** A program that sorts its keys puts top_k last. */
    @Test
    void read_keysInAnyOrderAndFurtherOnes_isTheSameTrace() throws IOException {
        ExpertTrace trace =
                read(
                        """
                        {"requests": [{"id": "a", "layers": [[1, 0], [2, 1]], "x": {"layers": 3}},
                                      {"layers": [[0, 2], [1, 2]]}],
                         "model": {"name": "m"}, "experts": 3, "top_k": 2}
                        """);
        assertEquals("ExpertTrace 2 requests, 2 tokens, 2 layers, top-2 of 3 experts", trace + "");
        assertEquals(2, trace.expert(1, 0, 0));
        assertEquals(2, trace.expert(0, 1, 1));
    }

    @ParameterizedTest
    @CsvSource(
            delimiter = '|',
            quoteCharacter = '`',
            value = {
                "{'experts':4,'top_k':2,'requests':[{'layers':[[0,1]]},{'layers':[[0,4]]}]}"
                        + "| request 1, layer 0: expert 4 does not exist, ids are 0..3",
                "{'experts':4,'top_k':2,'requests':[{'layers':[[0,1],[3,3]]}]}"
                        + "| request 0, layer 1: a token asks for expert 3 twice",
                "{'experts':4,'top_k':2,'requests':[{'layers':[[0,1,2]]}]}"
                        + "| request 0, layer 0: 3 ids are no whole number of tokens at top-2",
                "{'experts':4,'top_k':2,'requests':[{'layers':[[0,1],[0,1,2,3]]}]}"
                        + "| request 0, layer 1: 4 ids where layer 0 has 2",
                "{'experts':4,'top_k':2,'requests':[{'layers':[[0,1]]},{'layers':[[0,1],[0,1]]}]}"
                        + "| request 1: 2 layers where request 0 has 1",
                "{'experts':4,'top_k':2,'requests':[{'layers':[[0,1.5]]}]}"
                        + "| request 0, layer 0: not a whole number",
                "{'experts':4,'top_k':2,'requests':[{'layers':[[[0,1]]]}]}"
                        + "| request 0, layer 0: Expected an int but was BEGIN_ARRAY",
                "{'experts':4,'top_k':2,'requests':[{'ids':[]}]} | request 0: \"layers\" is missing",
                "{'experts':4,'top_k':2,'requests':[{'layers':[]}]} | request 0: there is no layer",
                "{'experts':4,'top_k':2,'requests':[{'layers':[[]]}]} | The trace holds no token",
                "{'experts':4,'top_k':2,'requests':[]} | there is no request",
                "{'experts':4,'top_k':2} | \"requests\" is missing",
                "{'experts':4,'requests':[]} | \"top_k\" is missing",
                "{'top_k':4,'requests':[]} | \"experts\" is missing",
                "{'experts':0,'top_k':1,'requests':[]} | \"experts\" is 0: it must be 1 to 65536",
                "{'experts':4,'top_k':5,'requests':[]} | \"top_k\" is 5: it must be 1 to 4",
                "{'experts':4,'top_k':2,'requests':[{'layers':[[0,1],[0 | request 0, layer 1: not a"
                        + " whole JSON file",
                "{'experts':4,'top_k':2,'requests':[{'layers':[[0,1]]}]} 7 | not a whole JSON file",
                "[1] | Expected BEGIN_OBJECT but was BEGIN_ARRAY",
                "`` | not a whole JSON file",
            })
    void read_badFile_namesFileRequestAndLayer(String json, String problem) throws IOException {
        IllegalArgumentException e =
                assertThrows(IllegalArgumentException.class, () -> read(json.replace('\'', '"')));
        String start = directory.resolve("trace.json") + ": " + problem;
        assertTrue(e.getMessage().startsWith(start), e::getMessage);
        assertEquals(1, e.getMessage().lines().count());
    }

    @Test
    void read_gzipThatIsNoneOrCutOff_isRefused() throws IOException {
        Path file = directory.resolve("t.json.gz");
        Files.writeString(file, "{\"experts\": 2}");
        assertThrows(IllegalArgumentException.class, () -> ExpertTrace.read(file));

        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        try (GZIPOutputStream packed = new GZIPOutputStream(bytes)) {
            packed.write("{\"experts\":4,\"top_k\":2,\"requests\":[]}".getBytes());
        }
        Files.write(file, java.util.Arrays.copyOf(bytes.toByteArray(), 20));
        assertThrows(IllegalArgumentException.class, () -> ExpertTrace.read(file));
    }

    @Test
    void read_missingFile_isAnIoException() {
        assertThrows(
                NoSuchFileException.class, () -> ExpertTrace.read(directory.resolve("none.json")));
    }

    @Test
    void entropy_evenSkewedAndSingle_isShannonsInBits() {
        ExpertTrace trace =
                ExpertTrace.builder()
                        .setNumExperts(4)
                        .setTopK(1)
                        .setNumLayers(3)
                        .beginRequest()
                        .append(0, 0, 1, 2, 3)
                        .append(1, 2, 2, 2, 2)
                        .append(2, 0, 0, 1, 3)
                        .build();
        assertArrayEquals(new double[] {2, 0, 1.5}, trace.entropy(), 1e-12);
    }

    private ExpertTrace read(String json) throws IOException {
        Path file = directory.resolve("trace.json");
        Files.writeString(file, json);
        return ExpertTrace.read(file);
    }
}
