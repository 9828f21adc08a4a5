package org.djlmoe.examples.cli;

import org.djlmoe.examples.text.ByteLevelTokenizer;
import org.djlmoe.model.MoeConfig;

/** Ready-made sizes for training from scratch. */
enum Preset {
    /** Trains in seconds; for trying things out. */
    TINY(64, 128, 2, 4, 128, 8, 128, 100),
    /** The base model of the demo: 3.4 million weights. */
    DEMO(128, 256, 4, 8, 256, 16, 256, 2000);

    final MoeConfig config;
    final int batch;
    final int sequence;
    final int steps;

    Preset(
            int hidden,
            int inner,
            int layers,
            int experts,
            int sequence,
            int batch,
            int positions,
            int steps) {
        this.config =
                MoeConfig.builder()
                        .setVocabSize(ByteLevelTokenizer.VOCAB_SIZE)
                        .setHiddenSize(hidden)
                        .setIntermediateSize(inner)
                        .setNumLayers(layers)
                        .setNumHeads(4)
                        .optNumKeyValueHeads(2)
                        .setNumExperts(experts)
                        .setTopK(2)
                        .optRopeTheta(10000)
                        .optMaxPositionEmbeddings(4 * positions)
                        .optTieWordEmbeddings(true)
                        .build();
        this.batch = batch;
        this.sequence = sequence;
        this.steps = steps;
    }
}
