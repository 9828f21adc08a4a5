package org.djlmoe.kernel;

import ai.djl.Device;
import ai.djl.engine.Engine;
import ai.djl.engine.EngineException;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.NDScope;
import ai.djl.ndarray.types.Shape;
import ai.djl.pytorch.engine.PtNDArray;
import ai.djl.pytorch.engine.PtNDManager;
import ai.djl.pytorch.engine.PtSymbolBlock;
import ai.djl.pytorch.jni.IValue;
import ai.djl.pytorch.jni.IValueUtils;
import ai.djl.pytorch.jni.JniUtils;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.Supplier;
import java.util.stream.Collectors;

/**
 * One text file of TorchScript functions, compiled by the PyTorch engine that DJL has loaded.
 *
 * <p>The idea: every ATen operator is reachable from TorchScript, and a TorchScript module is a zip
 * of text. So a kernel needs no native code of its own and runs wherever the engine runs, on the
 * CPU and on CUDA. The functions of a file are written as top-level {@code def name(self, ...)};
 * they may call each other as {@code self.name(...)}.
 *
 * <p>There are two ways to call a function:
 *
 * <ul>
 *   <li>{@link #run} and {@link #call} are fast, take arguments of any type and record nothing. The
 *       arrays that {@link #call} returns can never require a gradient; a kernel that fills arrays
 *       made by the caller has no such limit.
 *   <li>{@link #record} takes and returns arrays only, and runs under the thread's gradient mode:
 *       what it computes is differentiable, and the function may itself use {@code torch.grad}.
 * </ul>
 *
 * <p>All of them may be used by many threads at once, also with the same arrays as arguments.
 */
public final class TorchKernels {

    private static final Map<String, TorchKernels> LOADED = new ConcurrentHashMap<>();

    /**
     * Without this, PyTorch recompiles a function after its first calls, at an unpredictable
     * moment.
     */
    private static final ThreadLocal<Boolean> EXECUTOR_SET =
            ThreadLocal.withInitial(
                    () -> {
                        JniUtils.setGraphExecutorOptimize(false);
                        return true;
                    });

    private final String name;
    private final Supplier<String> text;
    private PtSymbolBlock module;

    private TorchKernels(String name, Supplier<String> text) {
        this.name = name;
        this.text = text;
    }

    /**
     * Returns the kernels of one or several text files. They are compiled at their first use in the
     * process; a {@link KernelException} is thrown by that use, and by every later one, if a file
     * is missing, does not compile, or the PyTorch engine is not there.
     *
     * @param owner the class beside whose class file the texts lie
     * @param resources the files' names, such as {@code norm.py, expert.py}; functions of one may
     *     call those of another
     * @return the kernels
     */
    public static TorchKernels load(Class<?> owner, String... resources) {
        String name = owner.getPackageName() + '/' + String.join("+", resources);
        return LOADED.computeIfAbsent(
                name,
                key ->
                        new TorchKernels(
                                key,
                                () ->
                                        Arrays.stream(resources)
                                                .map(resource -> read(owner, resource))
                                                .collect(Collectors.joining("\n"))));
    }

    /**
     * Returns the array that stands for an absent argument: it has no elements.
     *
     * @return a shared array, which must not be closed
     */
    public static NDArray nothing() {
        return Nothing.ARRAY;
    }

    private static final class Nothing {
        static final NDArray ARRAY = create();

        private static NDArray create() {
            try (NDScope scope = new NDScope()) {
                NDArray array = pytorchManager().create(new Shape(0));
                // The first request may come from within a scope, which would close it.
                NDScope.unregister(array);
                return array;
            }
        }
    }

    private static String read(Class<?> owner, String resource) {
        try (InputStream in = owner.getResourceAsStream(resource)) {
            if (in == null) {
                throw new KernelException(
                        "No kernel text "
                                + owner.getPackageName()
                                + '/'
                                + resource
                                + " on the class path");
            }
            return new String(in.readAllBytes(), StandardCharsets.UTF_8);
        } catch (IOException e) {
            throw new UncheckedIOException("Cannot read the kernel text " + resource, e);
        }
    }

    /**
     * Compiles kernel text.
     *
     * @param name a name for messages
     * @param text functions {@code def name(self, ...) -> ...:} at the left margin
     * @return the compiled kernels
     * @throws KernelException if the text does not compile or the PyTorch engine is not there
     */
    public static TorchKernels compile(String name, String text) {
        TorchKernels kernels = new TorchKernels(name, () -> text);
        kernels.module();
        return kernels;
    }

    private synchronized PtSymbolBlock module() {
        if (module == null) {
            byte[] archive = ScriptArchive.of(text.get());
            NDManager manager = pytorchManager();
            EXECUTOR_SET.get();
            try {
                module =
                        JniUtils.loadModule(
                                (PtNDManager) manager,
                                new ByteArrayInputStream(archive),
                                false,
                                false);
            } catch (EngineException e) {
                manager.close();
                throw new KernelException(
                        "Kernel text " + name + " does not compile: " + e.getMessage(), e);
            } catch (IOException e) {
                manager.close();
                throw new UncheckedIOException(e);
            }
        }
        return module;
    }

    private static NDManager pytorchManager() {
        if (!Engine.getAllEngines().contains("PyTorch")) {
            throw new KernelException(
                    "These kernels need DJL's PyTorch engine, but only "
                            + Engine.getAllEngines()
                            + " is on the class path. Add ai.djl.pytorch:pytorch-engine.");
        }
        // Lives as long as the process: the compiled functions are shared by everybody.
        return NDManager.newBaseManager(Device.cpu(), "PyTorch");
    }

    /**
     * Runs a function for its effect on arrays given to it.
     *
     * @param method the function's name
     * @param arguments arrays, {@code Integer}, {@code Long}, {@code Double}, {@code Float}, {@code
     *     Boolean}, {@code String}, or lists of arrays or of longs
     */
    public void run(String method, Object... arguments) {
        invoke(method, arguments).close();
    }

    /**
     * Runs a function and returns its result, one array or a tuple of arrays.
     *
     * @param manager the owner of the results
     * @param method the function's name
     * @param arguments as for {@link #run}
     * @return the results; they can never require a gradient
     */
    public NDList call(NDManager manager, String method, Object... arguments) {
        try (IValue result = invoke(method, arguments)) {
            NDList out = new NDList();
            if (result.isTensor()) {
                out.add(result.toTensor((PtNDManager) manager));
            } else if (result.isTuple()) {
                for (IValue element : result.toIValueTuple()) {
                    try (element) {
                        out.add(element.toTensor((PtNDManager) manager));
                    }
                }
            } else {
                throw new KernelException(name + ": " + method + " returns no array");
            }
            return out;
        }
    }

    /**
     * Runs a function that returns one float.
     *
     * @param method the function's name
     * @param arguments as for {@link #run}
     * @return the number
     */
    public double callDouble(String method, Object... arguments) {
        try (IValue result = invoke(method, arguments)) {
            return result.toDouble();
        }
    }

    /**
     * Runs a function that returns a truth value.
     *
     * @param method the function's name
     * @param arguments as for {@link #run}
     * @return the value
     */
    public boolean callBoolean(String method, Object... arguments) {
        try (IValue result = invoke(method, arguments)) {
            return result.toBoolean();
        }
    }

    private IValue invoke(String method, Object[] arguments) {
        EXECUTOR_SET.get();
        IValue[] values = new IValue[arguments.length];
        try {
            for (int i = 0; i < values.length; i++) {
                values[i] = toValue(arguments[i]);
            }
            return IValueUtils.runMethod(module(), method, values);
        } catch (EngineException e) {
            throw failure(method, e);
        } finally {
            // The engine leaks every argument (and the tensor behind it) that is not closed.
            for (IValue value : values) {
                if (value != null) {
                    value.close();
                }
            }
        }
    }

    private static IValue toValue(Object argument) {
        if (argument instanceof PtNDArray) {
            return IValue.from((PtNDArray) argument);
        } else if (argument instanceof Integer || argument instanceof Long) {
            return IValue.from(((Number) argument).longValue());
        } else if (argument instanceof Double || argument instanceof Float) {
            return IValue.from(((Number) argument).doubleValue());
        } else if (argument instanceof Boolean) {
            return IValue.from((boolean) argument);
        } else if (argument instanceof String) {
            return IValue.from((String) argument);
        } else if (argument instanceof long[]) {
            return IValue.listFrom((long[]) argument);
        } else if (argument instanceof List) {
            for (Object element : (List<?>) argument) {
                if (!(element instanceof PtNDArray)) {
                    throw refused(element);
                }
            }
            return IValue.listFrom(((List<?>) argument).toArray(new PtNDArray[0]));
        }
        throw refused(argument);
    }

    private static IllegalArgumentException refused(Object argument) {
        return new IllegalArgumentException(
                "A kernel takes arrays of the PyTorch engine, numbers, booleans, strings and lists, not "
                        + (argument == null ? "null" : argument.getClass().getName()));
    }

    /**
     * Runs a function under the thread's gradient mode.
     *
     * @param manager the owner of the results
     * @param method the function's name
     * @param arguments arrays, and lists of arrays that are not empty; numbers travel as an array
     * @return the results, recorded for differentiation if gradient mode is on
     */
    public NDList record(NDManager manager, String method, Object... arguments) {
        EXECUTOR_SET.get();
        // The engine tells arguments apart by the arrays' names. Other handles of the same tensors
        // carry these names: the caller's arrays may be named otherwise, appear twice, or be in use
        // by another thread.
        NDList list = new NDList();
        try {
            // The outputs attach to the manager of the first array, so the marker leads.
            NDArray marker = manager.create(0f);
            marker.setName("module_method:" + method);
            list.add(marker);
            for (int i = 0; i < arguments.length; i++) {
                if (arguments[i] instanceof List) {
                    for (Object element : (List<?>) arguments[i]) {
                        list.add(handle(manager, element, "list" + i + "[]"));
                    }
                } else {
                    list.add(handle(manager, arguments[i], null));
                }
            }
            return IValueUtils.forward(module(), list, true);
        } catch (EngineException e) {
            throw failure(method, e);
        } finally {
            list.close();
        }
    }

    private static NDArray handle(NDManager manager, Object argument, String name) {
        if (!(argument instanceof PtNDArray)) {
            throw refused(argument);
        }
        try (IValue value = IValue.from((PtNDArray) argument)) {
            NDArray handle = value.toTensor((PtNDManager) manager);
            handle.setName(name);
            return handle;
        }
    }

    private KernelException failure(String method, EngineException cause) {
        return new KernelException(
                "Kernel " + method + " of " + name + " failed: " + cause.getMessage(), cause);
    }
}
