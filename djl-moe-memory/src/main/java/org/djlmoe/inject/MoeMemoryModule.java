package org.djlmoe.inject;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.Trainer;
import ai.djl.training.TrainingConfig;
import ai.djl.training.loss.Loss;
import ai.djl.training.optimizer.Optimizer;
import com.google.inject.AbstractModule;
import com.google.inject.Provides;
import com.google.inject.Singleton;
import java.util.Optional;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.maskcoft.MaskCoFTStages;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.model.MoeDecoder;
import org.djlmoe.optimizer.OffloadStreamAdamW;
import org.djlmoe.training.LanguageModel;
import org.djlmoe.vocab.RingDtpLoss;

/**
 * Wires a language model and what trains it, for programs that use Guice. Without Guice the same
 * pieces are made with their builders; nothing in the library needs an injector.
 *
 * <p>Bound, each made on first use and then the same for the whole injector (an optimizer's state
 * belongs to one model):
 *
 * <ul>
 *   <li>{@link MoeMemorySettings} and {@link MoeConfig}
 *   <li>{@link LanguageModel}, its {@link MoeDecoder} and its DJL {@link Model}
 *   <li>{@link RingDtpLoss}, also as {@link Loss}
 *   <li>{@link OffloadStreamAdamW}, also as {@link Optimizer}
 *   <li>{@code Optional<MaskCoFTStages>}, present if the settings fine-tune by MaskCoFT: the model
 *       then has mask logits and adapters, and the trainer goes through the stages
 *   <li>{@link TrainingConfig}, of the loss, the optimizer and the stages
 *   <li>{@link BoundedTrainer}, also as {@link Trainer}, initialized
 * </ul>
 *
 * <pre>{@code
 * Injector injector = Guice.createInjector(
 *         new MoeMemoryModule(
 *                 MoeMemorySettings.builder()
 *                         .setModel(config)
 *                         .setLearningRate(Tracker.fixed(1e-3f))
 *                         .optClipNorm(1)
 *                         .build()));
 * try (LanguageModel model = injector.getInstance(LanguageModel.class);
 *         OffloadStreamAdamW optimizer = injector.getInstance(OffloadStreamAdamW.class);
 *         BoundedTrainer trainer = injector.getInstance(BoundedTrainer.class)) {
 *     EasyTrain.fit(trainer, 1, dataset, null);
 *     model.save(folder, SaveOptions.builder().build());
 * }
 * }</pre>
 *
 * <p>Guice closes nothing: whoever asks for the model, the optimizer and the trainer closes them,
 * in the reverse order, and drops the injector with them.
 *
 * <p>Every piece is made from the bindings of the others, so one can be replaced and the rest
 * follows; a model from a checkpoint, for instance:
 *
 * <pre>{@code
 * Modules.override(new MoeMemoryModule(settings)).with(new AbstractModule() {
 *     @Provides
 *     @Singleton
 *     LanguageModel model() throws IOException {
 *         return LanguageModel.load(folder, LanguageModel.Chunks.DEFAULT);
 *     }
 * })
 * }</pre>
 *
 * <p>A replaced model is used as it is: prior, balance coefficient, seed and chunk size of the
 * settings are applied only to a model that is made here. Replace {@link Loss} or {@link
 * Optimizer}, not the classes behind them, to train with one of another class.
 */
public final class MoeMemoryModule extends AbstractModule {

    private final MoeMemorySettings settings;

    /**
     * Creates a module.
     *
     * @param settings what to wire from
     */
    public MoeMemoryModule(MoeMemorySettings settings) {
        if (settings == null) {
            throw new IllegalArgumentException("settings are missing: MoeMemorySettings.builder()");
        }
        this.settings = settings;
    }

    @Override
    protected void configure() {
        bind(MoeMemorySettings.class).toInstance(settings);
        bind(MoeConfig.class).toInstance(settings.model());
        bind(Loss.class).to(RingDtpLoss.class);
        bind(Optimizer.class).to(OffloadStreamAdamW.class);
        bind(Trainer.class).to(BoundedTrainer.class);
    }

    @Provides
    @Singleton
    LanguageModel languageModel(MoeConfig config) {
        LanguageModel model =
                LanguageModel.create(
                        config,
                        new LanguageModel.Chunks(
                                settings.chunkTokens(), LanguageModel.Chunks.DEFAULT.vocabTokens()),
                        settings.seed());
        try {
            settings.prior().ifPresent(prior -> prior.apply(model.decoder()));
            model.decoder()
                    .moeBlocks()
                    .forEach(layer -> layer.setBalanceCoefficient(settings.balance()));
            return model;
        } catch (RuntimeException e) {
            model.close();
            throw e;
        }
    }

    @Provides
    MoeDecoder decoder(LanguageModel model) {
        return model.decoder();
    }

    @Provides
    Model model(LanguageModel model) {
        return model.model();
    }

    @Provides
    @Singleton
    RingDtpLoss loss() {
        return RingDtpLoss.builder()
                .optLabelSmoothing(settings.labelSmoothing())
                .optZLoss(settings.zLoss())
                .build();
    }

    @Provides
    @Singleton
    Optional<MaskCoFTStages> stages(LanguageModel model) {
        return settings.maskCoFT()
                .map(
                        recipe ->
                                MaskCoFTStages.attach(
                                        model.decoder().moeBlocks(), model.manager(), recipe));
    }

    /** After the stages have added their parameters, so that the optimizer knows them by name. */
    @Provides
    @Singleton
    OffloadStreamAdamW optimizer(MoeDecoder decoder, Optional<MaskCoFTStages> stages) {
        OffloadStreamAdamW.Builder builder =
                OffloadStreamAdamW.builder()
                        .setLearningRateTracker(settings.learningRate())
                        .optWeightDecay(settings.weightDecay())
                        .optBlock(decoder);
        // An infinite norm would have it measured at every step.
        if (Double.isFinite(settings.clipNorm())) {
            builder.optClipNorm(settings.clipNorm());
        }
        settings.stateDirectory().ifPresent(builder::optFileTier);
        return builder.build();
    }

    @Provides
    @Singleton
    TrainingConfig trainingConfig(
            Loss loss, Optimizer optimizer, LanguageModel model, Optional<MaskCoFTStages> stages) {
        DefaultTrainingConfig config =
                new DefaultTrainingConfig(loss)
                        .optOptimizer(optimizer)
                        .optDevices(new Device[] {model.manager().getDevice()});
        stages.ifPresent(config::addTrainingListeners);
        return config;
    }

    @Provides
    @Singleton
    BoundedTrainer trainer(Model model, TrainingConfig config) {
        BoundedTrainer trainer = new BoundedTrainer(model, config, settings.seed());
        trainer.initialize(new Shape(1, 1));
        return trainer;
    }
}
