package org.djlmoe.examples.study;

/** What is compared. */
public enum Arm {
    /** The model as it is. */
    BASE("base", null),
    /** The cache prior on the base. */
    BASE_CACHE("base + cache prior", BASE),
    /** Routers and adapters, cross-entropy, no mask, the same tokens. */
    CONTROL("control", null),
    /** The cache prior on the control. */
    CONTROL_CACHE("control + cache prior", CONTROL),
    /** Co-adaptation under a mask drawn at random. */
    RANDOM("random mask", null),
    /** Co-adaptation under the mask of the experts that the base uses most. */
    FREQUENT("most-frequent mask", null),
    /** Co-adaptation under the learned mask. */
    MASKCOFT("maskcoft", null),
    /** The cache prior on top of MaskCoFT's. */
    MASKCOFT_CACHE("maskcoft + cache prior", MASKCOFT);

    private final String label;
    private final Arm model;

    Arm(String label, Arm model) {
        this.label = label;
        this.model = model;
    }

    /** Returns the name in tables. */
    public String label() {
        return label;
    }

    /** Returns the arm whose model this one uses, itself if it has its own. */
    public Arm model() {
        return model == null ? this : model;
    }

    /** Returns whether a cache prior steers it. */
    public boolean steersByCache() {
        return model != null;
    }
}
