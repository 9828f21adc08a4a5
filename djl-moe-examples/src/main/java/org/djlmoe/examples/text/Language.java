package org.djlmoe.examples.text;

import java.util.Locale;

/** The languages of the European Parliament's transcripts, and {@link #UNKNOWN}. */
public enum Language {
    BULGARIAN("bg"),
    CZECH("cs"),
    DANISH("da"),
    DUTCH("nl"),
    ENGLISH("en"),
    ESTONIAN("et"),
    FINNISH("fi"),
    FRENCH("fr"),
    GERMAN("de"),
    GREEK("el"),
    HUNGARIAN("hu"),
    ITALIAN("it"),
    LATVIAN("lv"),
    LITHUANIAN("lt"),
    POLISH("pl"),
    PORTUGUESE("pt"),
    ROMANIAN("ro"),
    SLOVAK("sk"),
    SLOVENE("sl"),
    SPANISH("es"),
    SWEDISH("sv"),
    /** A text that is too short, mixed, or in no language listed here. */
    UNKNOWN("und");

    private final String code;

    Language(String code) {
        this.code = code;
    }

    /** Returns the ISO 639-1 code, {@code und} for UNKNOWN. */
    public String code() {
        return code;
    }

    /** Returns the English name, such as {@code German}. */
    public String label() {
        return name().charAt(0) + name().substring(1).toLowerCase(Locale.ROOT);
    }

    /**
     * Finds a language by its code or English name, in any case.
     *
     * @throws IllegalArgumentException if there is none
     */
    public static Language of(String codeOrName) {
        for (Language language : values()) {
            if (language.code.equalsIgnoreCase(codeOrName)
                    || language.name().equalsIgnoreCase(codeOrName)) {
                return language;
            }
        }
        StringBuilder known = new StringBuilder();
        for (Language language : values()) {
            known.append(known.isEmpty() ? "" : ", ").append(language.code);
        }
        throw new IllegalArgumentException(
                "no language \"" + codeOrName + "\"; there are " + known);
    }
}
