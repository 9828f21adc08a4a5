package org.djlmoe.examples.report;

import java.awt.Color;
import java.util.LinkedHashMap;
import java.util.Map;

/**
 * A colour a name, in the order in which names are first asked for.
 *
 * <p>Ten hues of like weight, legible on white and on near black. An eleventh name begins anew; its
 * lines are dashed.
 */
final class Palette {

    private static final int[] HUES = {
        0x4269d0, 0xe8a30c, 0xf2604a, 0x3ca951, 0xa463f2, 0x35b0a8, 0xf277a8, 0x9c6b4e, 0x7a9be0,
        0x8b9099
    };

    private final Map<String, Integer> order = new LinkedHashMap<>();

    Color color(String name) {
        return new Color(HUES[index(name) % HUES.length]);
    }

    boolean dashed(String name) {
        return index(name) / HUES.length % 2 == 1;
    }

    String css(String name) {
        return "#%06x".formatted(color(name).getRGB() & 0xffffff);
    }

    private int index(String name) {
        return order.computeIfAbsent(name, n -> order.size());
    }
}
