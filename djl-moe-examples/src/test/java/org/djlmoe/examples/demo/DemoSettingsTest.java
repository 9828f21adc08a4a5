package org.djlmoe.examples.demo;

import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.Path;
import org.djlmoe.checkpoint.HfCheckpoint;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.plan.MemoryPlan;
import org.djlmoe.plan.PlanSettings;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

class DemoSettingsTest {

    @TempDir private Path folder;

    /** The demo plans its training; its evaluations must fit into that, whatever the chunks. */
    @ParameterizedTest
    @ValueSource(ints = {16, 32, 64, 128, 256, 512, 1024, 4096})
    void evaluationBatch_anyChunks_needsNoMoreThanTraining(int chunk) throws IOException {
        MoeConfig config =
                MoeConfig.fromJson(BaseModel.extract(folder).resolve(HfCheckpoint.CONFIG_FILE));
        DemoSettings settings = DemoSettings.of(false, 0);
        PlanSettings training =
                PlanSettings.builder()
                        .setBatch(settings.batch())
                        .setSequence(settings.sequence())
                        .optAdapters(DemoSettings.RANK)
                        .optMoeChunkTokens(chunk)
                        .optVocabBlockTokens(Math.min(512, chunk))
                        .build();
        PlanSettings evaluation =
                training.toBuilder()
                        .setBatch(DemoSettings.EVALUATION_BATCH)
                        .optEvaluation(true)
                        .build();
        long needed = MemoryPlan.of(config, evaluation).peakBytes();
        long planned = MemoryPlan.of(config, training).peakBytes();

        assertTrue(needed <= planned, needed + " of " + planned);
    }
}
