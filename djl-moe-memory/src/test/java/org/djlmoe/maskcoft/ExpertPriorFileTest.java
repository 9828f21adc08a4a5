package org.djlmoe.maskcoft;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/** Files that people write by hand. */
class ExpertPriorFileTest {

    private static final String GOOD =
            "{\"experts\": 3, \"mask\": [[0, 2]], \"form\": \"scaled\", \"beta\": 2,"
                    + " \"protected_top\": 1}";

    @TempDir Path folder;

    private ExpertPrior load(String text) throws IOException {
        Files.writeString(folder.resolve(ExpertPrior.FILE), text);
        return ExpertPrior.load(folder);
    }

    @Test
    void load_keysThatMayBeLeftOut_haveTheirDefaults() throws IOException {
        ExpertPrior prior = load(GOOD);
        assertEquals(2, prior.prior().beta());
        assertEquals(List.of(1.0), prior.logitRanges());
    }

    @ParameterizedTest
    @CsvSource(
            delimiter = '|',
            quoteCharacter = '\0',
            value = {
                "experts       |        | Not an expert mask: \"experts\" and \"mask\" are required",
                "mask          |        | Not an expert mask: \"experts\" and \"mask\" are required",
                "mask          | \"x\"  | Not an expert mask: it must be a JSON object with a number"
                        + " \"experts\" and a list of ids a layer \"mask\"",
                "beta          |        | \"beta\" is missing",
                "beta          | null   | \"beta\" is missing",
                "beta          | \"x\"  | \"beta\" must be a number, not \"x\"",
                "beta          | [1]    | \"beta\" must be one value, not [1]",
                "form          |        | \"form\" is missing",
                "form          | \"sum\" | \"form\" must be one of additive, scaled, probability, not"
                        + " \"sum\"",
                "protected_top |        | \"protected_top\" is missing",
                "protected_top | 1.5    | \"protected_top\" must be a whole number, not 1.5",
                "weights       | \"no\" | \"weights\" must be one of all, kept, not \"no\"",
                "logit_range   | \"x\"  | \"logit_range\" must be a number, not \"x\"",
                "logit_range   | [[]]   | \"logit_range\" must be one value, not []"
            })
    void load_brokenKey_namesFileAndKey(String key, String value, String problem) {
        JsonObject json = JsonParser.parseString(GOOD).getAsJsonObject();
        json.remove(key);
        if (value != null) {
            json.add(key, JsonParser.parseString(value));
        }
        String message =
                assertThrows(IllegalArgumentException.class, () -> load(json.toString()))
                        .getMessage();
        assertEquals(
                folder.resolve(ExpertPrior.FILE) + " is not a MaskCoFT prior: " + problem, message);
    }

    @Test
    void load_bytesThatAreNoText_namesTheFile() throws IOException {
        Path file = Files.write(folder.resolve(ExpertPrior.FILE), new byte[] {'{', (byte) 0xff});
        assertEquals(
                file + " is not a MaskCoFT prior: it is not text in UTF-8",
                assertThrows(IllegalArgumentException.class, () -> ExpertPrior.load(folder))
                        .getMessage());
    }
}
