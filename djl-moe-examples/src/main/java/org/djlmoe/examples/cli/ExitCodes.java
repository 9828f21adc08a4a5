package org.djlmoe.examples.cli;

/** What {@code moe} returns to the shell. */
public final class ExitCodes {
    /** The command did what was asked. */
    public static final int OK = 0;

    /** The command failed though it was asked for properly; the fault is ours or the machine's. */
    public static final int FAILURE = 1;

    /** The command was asked for wrongly; stderr has one line that says what to change. */
    public static final int USAGE = 2;

    private ExitCodes() {}
}
