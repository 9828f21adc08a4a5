package org.djlmoe.io;

import java.io.IOException;
import java.nio.FloatBuffer;
import java.nio.file.Path;

/**
 * Writes files that are larger than the process may make any, and prints what their errors say.
 *
 * <p>Arguments: a folder.
 */
final class FullDiskRun {

    private static final int VALUES = 1 << 18;

    private FullDiskRun() {}

    private interface Writing {
        void run() throws IOException;
    }

    public static void main(String[] arguments) {
        Path folder = Path.of(arguments[0]);
        report(() -> AtomicFiles.writeString(folder.resolve("text"), "x".repeat(VALUES)));
        report(
                () -> {
                    try (SafetensorsWriter writer =
                            SafetensorsWriter.builder()
                                    .addTensor("w", DType.F32, VALUES)
                                    .build(folder.resolve("one.safetensors"))) {
                        writer.writeF32("w", FloatBuffer.allocate(VALUES));
                    }
                });
        report(
                () -> {
                    try (ShardedSafetensorsWriter writer =
                            ShardedSafetensorsWriter.builder()
                                    .setFolder(folder)
                                    .addTensor("w", DType.F32, VALUES)
                                    .build()) {
                        writer.writeF32("w", FloatBuffer.allocate(VALUES));
                    }
                });
    }

    private static void report(Writing writing) {
        try {
            writing.run();
            System.out.println("written");
        } catch (IOException e) {
            System.out.println(e.getMessage());
        }
    }
}
