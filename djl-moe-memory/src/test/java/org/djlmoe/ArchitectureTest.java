package org.djlmoe;

import static com.tngtech.archunit.core.domain.JavaClass.Predicates.resideInAPackage;
import static com.tngtech.archunit.core.domain.JavaClass.Predicates.resideInAnyPackage;
import static com.tngtech.archunit.lang.syntax.ArchRuleDefinition.classes;
import static com.tngtech.archunit.lang.syntax.ArchRuleDefinition.noClasses;
import static com.tngtech.archunit.library.dependencies.SlicesRuleDefinition.slices;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.tngtech.archunit.base.DescribedPredicate;
import com.tngtech.archunit.core.domain.JavaClass;
import com.tngtech.archunit.core.domain.JavaClasses;
import com.tngtech.archunit.core.importer.ClassFileImporter;
import com.tngtech.archunit.core.importer.ImportOption;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.stream.Collectors;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;

/** Packages depend on each other in one direction. A new package needs a row in the table. */
class ArchitectureTest {

    private static final String ROOT = "org.djlmoe.";
    private static final JavaClasses LIBRARY =
            new ClassFileImporter()
                    .withImportOption(new ImportOption.DoNotIncludeTests())
                    .importPackages("org.djlmoe");

    /** What each package may know of the others. */
    private static final Map<String, String> MAY_USE =
            new TreeMap<>(
                    Map.ofEntries(
                            Map.entry("kernel", ""),
                            Map.entry("io", ""),
                            Map.entry("tier", "kernel io"),
                            Map.entry("parallel", "kernel"),
                            Map.entry("data", "io"),
                            Map.entry("autograd", "kernel"),
                            Map.entry("routing", "kernel"),
                            Map.entry("expert", "kernel routing"),
                            Map.entry("cache", "io routing"),
                            Map.entry("dispatch", "kernel parallel routing"),
                            Map.entry("offload", "kernel io tier autograd"),
                            Map.entry("optimizer", "kernel io tier autograd"),
                            Map.entry("moe", "kernel parallel autograd routing expert dispatch"),
                            Map.entry("vocab", "kernel parallel autograd"),
                            Map.entry(
                                    "model",
                                    "kernel io parallel autograd routing expert dispatch moe"
                                            + " vocab"),
                            Map.entry("checkpoint", "kernel io model"),
                            Map.entry(
                                    "plan",
                                    "kernel io tier parallel autograd routing expert dispatch"
                                            + " offload optimizer moe vocab model"),
                            Map.entry(
                                    "serving",
                                    "kernel io tier autograd routing expert cache moe vocab model"
                                            + " checkpoint"),
                            Map.entry(
                                    "training",
                                    "autograd cache checkpoint data expert io kernel model moe optimizer"
                                            + " routing vocab"),
                            Map.entry(
                                    "maskcoft",
                                    "autograd cache checkpoint data expert io model moe optimizer"
                                            + " routing training"),
                            Map.entry(
                                    "inject",
                                    "autograd maskcoft model moe optimizer training vocab")));

    static Set<String> rows() {
        return MAY_USE.keySet();
    }

    private static Set<String> packages() {
        return LIBRARY.stream()
                .map(c -> c.getPackageName().substring(ROOT.length()).split("\\.")[0])
                .collect(Collectors.toCollection(TreeSet::new));
    }

    @Test
    void packages_all_haveARowInTheTable() {
        Set<String> unknown = packages();
        unknown.removeAll(MAY_USE.keySet());
        assertEquals(Set.of(), unknown, "packages without a row");
        assertTrue(packages().size() >= 10, "the library was not found: " + packages());
    }

    @ParameterizedTest
    @MethodSource("rows")
    void package_usesOnlyWhatItsRowAllows(String name) {
        List<String> allowed = new ArrayList<>(List.of(ROOT + name + ".."));
        for (String other : MAY_USE.get(name).split(" ")) {
            if (!other.isEmpty()) {
                assertTrue(MAY_USE.containsKey(other), other);
                allowed.add(ROOT + other + "..");
            }
        }
        DescribedPredicate<JavaClass> forbidden =
                resideInAPackage("org.djlmoe..")
                        .and(
                                DescribedPredicate.not(
                                        resideInAnyPackage(allowed.toArray(new String[0]))));
        noClasses()
                .that()
                .resideInAPackage(ROOT + name + "..")
                .should()
                .dependOnClassesThat(forbidden)
                .allowEmptyShould(true)
                .check(LIBRARY);
    }

    @Test
    void packages_all_freeOfCycles() {
        slices().matching("org.djlmoe.(*)..").should().beFreeOfCycles().check(LIBRARY);
    }

    @Test
    void engineInternals_onlyInKernelAndAutogradAndBoundaryArray() {
        noClasses()
                .that()
                .resideOutsideOfPackages(ROOT + "kernel..", ROOT + "autograd..")
                .and()
                .doNotHaveFullyQualifiedName(ROOT + "offload.BoundaryArray")
                .should()
                .dependOnClassesThat()
                .resideInAPackage("ai.djl.pytorch..")
                .check(LIBRARY);
    }

    @Test
    void io_usesNothingButGson() {
        classes()
                .that()
                .resideInAPackage(ROOT + "io..")
                .should()
                .onlyDependOnClassesThat()
                .resideInAnyPackage("java..", "com.google.gson..", ROOT + "io..")
                .check(LIBRARY);
    }

    @Test
    void packages_all_sayWhatTheyAreFor() {
        for (JavaClass type : LIBRARY) {
            Path folder = Path.of("src/main/java", type.getPackageName().replace('.', '/'));
            assertTrue(
                    Files.isRegularFile(folder.resolve("package-info.java")),
                    folder + " has no package-info.java");
        }
    }
}
