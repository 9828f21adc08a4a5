package org.djlmoe.parallel;

/** One collective call: what each rank brought, and who is through with it. Guarded by the hub. */
final class Round {

    final String what;
    final Object[] contributions;
    int left;

    Round(String what, int size) {
        this.what = what;
        this.contributions = new Object[size];
    }
}
